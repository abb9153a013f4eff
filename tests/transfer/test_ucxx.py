"""The `ucxx` backend alone: what becomes of what a writer has announced and never sends."""

from kvferry.transfer.names import agent_name
from kvferry.transfer.spans import make_spans
from kvferry.transfer.ucxx_agent import UcxxAgent, make_context
from kvferry.transfer.ucxx_wire import CONTROL, Batch, Hello, Note, encoder, metadata_decoder, tag

WRITER = 0xA


async def test_a_writer_that_dies_between_a_batch_and_its_bytes_leaves_nothing_behind(make_site, tools):
    """Nothing ever completes a receive whose message was never sent, and no worker can go that has one."""
    target = await make_site("ucxx-host", 0xB, tools.Memory())
    descriptor = await target.endpoint.accept(WRITER)
    writer = UcxxAgent(make_context("host", "127.0.0.1"), agent_name(WRITER, 0), 0)
    writer.open_peer(metadata_decoder.decode(descriptor.metadata).address)
    batch = Batch(0, make_spans(0, 0, 0, 0, [65536]).tobytes())
    for message in (Hello(writer.name, writer.address), batch, Note(b"announced")):
        writer.send_message(tag(CONTROL, 0), encoder.encode(message))

    def heard():
        writer.progress()
        return [payload for _, payload in target.notes] == [b"announced"]

    await tools.soon(heard)
    writer.delete()
    await target.endpoint.revoke(WRITER)
    await target.endpoint.close()
    assert not target.memory.arrays[0].any()  # and `make_site` looks for sockets
