"""The engine, end to end, on one question."""

from kvferry.engine.contract import Sequence, StepPlan
from kvferry.protocol.request import Sampling


async def test_the_capital_of_france(engine, chat, texts):
    sampling = Sampling(max_tokens=16)
    fed = chat.render([{"role": "user", "content": "What is the capital of France?"}])
    stream = texts.stream(sampling)
    start, text, finish = 0, "", ""
    for step in range(16):
        plan = StepPlan(step, (Sequence(0, fed, start, (7, 3, 11, 5), sampling),))
        (drawn,) = (await engine.step(plan)).drawn
        emission = stream.push(drawn.token_id)
        text, finish = text + emission.text, emission.finish_reason
        if finish:
            break
        start, fed = start + len(fed), (drawn.token_id,)
    assert text == "The capital of France is Paris."
    assert finish == "stop"
