"""A token's own bytes, in the spellings that tokenizers use."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Decoder, Fuse, Metaspace, Replace, Sequence, Strip
from tokenizers.models import BPE

from kvferry.engine.token_pieces import TokenPiece, TokenPieces


@pytest.mark.parametrize("text", ["plain", "é“”", "🙂 东京", "a\n\tb\x00 \u00ad", "👩‍👩‍👧", "a\u0301"])
def test_the_pieces_of_a_text_join_to_its_bytes(chat, text):
    ids = chat.encode(text)
    assert b"".join(chat.piece(token_id).data for token_id in ids) == text.encode()


def test_half_a_character_keeps_its_byte_and_a_special_token_has_none(chat):
    first, *others = chat.encode("🙂")
    assert others and chat.piece(first) == TokenPiece("�", "🙂".encode()[: len(chat.piece(first).data)])
    end = chat.encode("<|im_end|>")
    assert [chat.piece(token_id) for token_id in end] == [TokenPiece("<|im_end|>", None)]


def test_every_byte_of_the_byte_level_alphabet(chat):
    """SmolLM2's vocabulary spells single bytes too: those it has are all different."""
    singles = {piece.data for token_id in range(49152) if len((piece := chat.piece(token_id)).data or b"") == 1}
    assert {bytes([byte]) for byte in range(0x20, 0x7F)} <= singles and len(singles) > 200


def made(decoder: Decoder | None, *spellings: str) -> TokenPieces:
    tokenizer = Tokenizer(BPE({spelling: i for i, spelling in enumerate(spellings)}, []))
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return TokenPieces(tokenizer)


LLAMA = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])


@pytest.mark.parametrize(
    ("decoder", "spelling", "piece"),
    [
        (LLAMA, "▁the", TokenPiece(" the", b" the")),
        (LLAMA, "<0xE2>", TokenPiece("�", b"\xe2")),
        (LLAMA, "<0x0A>", TokenPiece("\n", b"\n")),
        (LLAMA, "<0xE2>x", TokenPiece("<0xE2>x", b"<0xE2>x")),
        (Metaspace(), "▁東", TokenPiece(" 東", " 東".encode())),
        (Metaspace(), "<0xE2>", TokenPiece("<0xE2>", b"<0xE2>")),
        (ByteLevel(), "Ġthe", TokenPiece(" the", b" the")),
        (ByteLevel(), "âĢ", TokenPiece("�", b"\xe2\x80")),
        (None, "the", TokenPiece("the", b"the")),
    ],
)
def test_spellings(decoder, spelling, piece):
    pieces = made(decoder, spelling)
    assert pieces(0) == piece
    assert pieces(1) == TokenPiece("<tool>", b"<tool>")
    assert pieces(2) == TokenPiece("<end>", None)
    assert pieces(3) == TokenPiece("", b"")  # padding of the embedding
