"""Where captured steps make records: the order of forks and joins, and that attention does not depend on it."""

import pytest
import torch
from mini_engine import MiniEngine, Request
from mla_mini_engine import MlaMiniEngine
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context

from kvskim.engines.vllm import facts, probe
from kvskim.engines.vllm import state as state_module
from kvskim.engines.vllm.encode_placement import EncodeOrder
from kvskim.ops.dispatch import Choice
from kvskim.ops.write_cache import write_cache

FEW = {"selector": "minmax", "rule": "budget", "budget_pages": 6}


class Streams:
    """Takes down what happens; forked work is done when it is waited for, as late as a GPU may, or at once, as soon as one may."""

    def __init__(self, at_once: bool = False) -> None:
        self.is_capturing = False
        self.at_once = at_once
        self.log: list[str] = []
        self.forked: list = []
        self.marked = 0

    def capturing(self) -> bool:
        return self.is_capturing

    def fork(self, work) -> None:
        self.log.append("fork")
        if self.at_once:
            work()
        else:
            self.forked.append(work)

    def mark(self) -> None:
        self.marked = len(self.forked)

    def wait(self) -> None:
        self.log.append("wait")
        for work in self.forked[: self.marked]:
            work()
        del self.forked[: self.marked]
        self.marked = 0

    def join(self) -> None:
        self.log.append("join")
        for work in self.forked:
            work()
        self.forked.clear()


def one_pass(order: EncodeOrder, streams: Streams, *, capture: bool, alone: bool = True, layers: str = "abc") -> list[str]:
    """What the streams see of one pass of a model of these layers."""
    streams.is_capturing = capture
    streams.log.clear()
    for layer in layers:
        streams.log.append(f"write {layer}")
        order.written(layer, lambda aside, layer=layer: streams.log.append(f"encode {layer}{' aside' if aside else ''}"), alone=alone)
        streams.log.append(f"select {layer}")
        order.selected()
        order.selected()  # of further rows
        streams.log.append(f"attend {layer}")
        order.attended(layer)
    return list(streams.log)


def gathered_pass(order: EncodeOrder, streams: Streams, *, layers: str = "abc", alone: str = "") -> list[str]:
    """The same in a graph, where the records of all layers but those of ``alone`` can be made together; what is told of a layer is its name."""
    streams.is_capturing = True
    streams.log.clear()
    for layer in layers:
        streams.log.append(f"write {layer}")
        order.written(
            layer, lambda aside, layer=layer: streams.log.append(f"encode {layer}{' aside' if aside else ''}"), alone=True,
            together=lambda layer=layer: None if layer in alone else layer,
        )
        streams.log.append(f"select {layer}")
        order.selected()
        order.selected()
        streams.log.append(f"attend {layer}")
        order.attended(layer)
    return list(streams.log)


AT_ONCE = [f"{what} {layer}" for layer in "abc" for what in ("write", "encode", "select", "attend")]
ASIDE = [
    *(entry for layer in "abc" for entry in (f"write {layer}", f"select {layer}", "fork", f"attend {layer}")),
    "join", *(f"encode {layer} aside" for layer in "abc"),
]


def new_order(window_pages: int = 2) -> tuple[EncodeOrder, Streams]:
    order, streams = EncodeOrder(window_pages), Streams()
    order.streams = streams
    return order, streams


def test_every_layer_is_forked_behind_its_selection_and_all_are_joined_behind_the_last():
    order, streams = new_order()
    one_pass(order, streams, capture=False)
    for _ in range(3):  # graphs of several sizes, one after the other
        assert one_pass(order, streams, capture=True) == ASIDE
        assert order.forked == 3


def gathering_order(window_pages: int = 2) -> tuple[EncodeOrder, Streams]:
    streams = Streams()
    order = EncodeOrder(window_pages, lambda layers: streams.log.append(f"encode {' '.join(layers)} together"))
    order.streams = streams
    one_pass(order, streams, capture=False)
    return order, streams


def test_records_of_all_layers_are_made_together_behind_the_selection_of_the_last():
    order, streams = gathering_order()
    for _ in range(3):
        assert gathered_pass(order, streams) == [
            "write a", "select a", "attend a", "write b", "select b", "attend b", "write c", "select c", "fork", "attend c", "join", "encode a b c together",
        ]
        assert order.forked == 3


def test_layers_that_cannot_be_made_together_are_forked_each():
    order, streams = gathering_order()
    assert gathered_pass(order, streams, alone="b") == [
        "write a", "select a", "attend a", "write b", "select b", "fork", "attend b", "write c", "select c", "fork", "attend c", "join",
        "encode b aside", "encode a c together",
    ]
    assert gathered_pass(order, streams, alone="c") == [
        "write a", "select a", "attend a", "write b", "select b", "attend b", "write c", "select c", "fork", "fork", "attend c", "join",
        "encode c aside", "encode a b together",
    ]
    assert order.forked == 3


def test_nothing_is_gathered_where_nothing_is_forked():
    small, streams = gathering_order(window_pages=1)
    assert gathered_pass(small, streams) == AT_ONCE
    order, streams = gathering_order()
    # Behind the layer that was the last one, records are made at once.
    assert gathered_pass(order, streams, layers="abcd")[-5:] == ["encode a b c together", "write d", "encode d", "select d", "attend d"]
    assert gathered_pass(order, streams, layers="abcd")[-2:] == ["join", "encode a b c d together"]
    without = EncodeOrder(2)
    without.streams = streams
    one_pass(without, streams, capture=False)
    assert gathered_pass(without, streams) == ASIDE


def test_a_graph_without_the_layer_that_makes_all_records_is_an_error():
    order, streams = gathering_order()
    gathered_pass(order, streams, layers="ab")
    with pytest.raises(RuntimeError, match="did not come to the layer that makes the records of all layers"):
        order.written("a", lambda aside: None, alone=True, together=lambda: "a")
    # Attention outside the graph that holds the write.
    order, streams = gathering_order()
    streams.is_capturing = True
    order.written("a", lambda aside: None, alone=True, together=lambda: "a")
    streams.is_capturing = False
    with pytest.raises(RuntimeError, match="its records would be missing"):
        order.selected()
    # Said once: what comes then is a new pass.
    assert one_pass(order, streams, capture=False) == AT_ONCE


def test_eager_steps_and_steps_with_other_rows_make_records_at_once():
    order, streams = new_order()
    for capture, alone in ((False, True), (True, False), (False, False)):
        assert one_pass(order, streams, capture=capture, alone=alone) == AT_ONCE
        assert order.forked == 0
    assert one_pass(order, streams, capture=True) == ASIDE


def test_a_window_of_one_page_and_a_device_without_streams_make_records_at_once():
    order, streams = new_order(window_pages=1)
    without = EncodeOrder(2)
    for made in (order, without):
        one_pass(made, streams, capture=False)
        assert one_pass(made, streams, capture=True) == AT_ONCE


def test_nothing_is_forked_that_might_not_be_joined():
    order, streams = new_order()
    # Without a pass before it nobody knows which layer is the last.
    assert one_pass(order, streams, capture=True) == AT_ONCE
    # Behind the layer that was the last one before, records are made at once.
    assert one_pass(order, streams, capture=True, layers="abcd") == [*ASIDE, "write d", "encode d", "select d", "attend d"]
    assert not streams.forked
    # From then on d is the last one.
    again = one_pass(order, streams, capture=True, layers="abcd")
    assert again.index("join") > again.index("attend d")
    assert again.count("fork") == 4


def test_a_pass_that_failed_leaves_nothing_behind():
    order, streams = new_order()
    one_pass(order, streams, capture=False)
    streams.is_capturing = True
    order.written("a", lambda aside: None, alone=True)
    order.selected()
    order.written("b", lambda aside: pytest.fail("of a pass that has failed"), alone=True)  # and then something raised
    assert streams.forked
    streams.forked.clear()
    assert one_pass(order, streams, capture=False) == AT_ONCE
    assert one_pass(order, streams, capture=True) == ASIDE


def test_a_pass_that_failed_with_gathered_layers_is_said_once():
    """It can't be told from a graph that lacks records; the pass after the one that says so is as any other."""
    order, streams = gathering_order()
    streams.is_capturing = True
    for layer in "ab":
        order.written(layer, lambda aside: pytest.fail("of a pass that has failed"), alone=True, together=lambda layer=layer: layer)
        order.selected()  # and then something raised
    with pytest.raises(RuntimeError, match="it failed"):
        one_pass(order, streams, capture=False)
    assert one_pass(order, streams, capture=False) == AT_ONCE
    assert gathered_pass(order, streams)[-1] == "encode a b c together"


def test_what_makes_records_together_is_asked_for_only_where_they_are_forked():
    order, streams = gathering_order()
    for capture, alone in ((False, True), (True, False)):
        streams.is_capturing = capture
        order.written("a", lambda aside: None, alone=alone, together=lambda: pytest.fail("records are made at once"))
        order.attended("a")


def test_other_work_of_a_layer_is_forked_and_joined_like_records():
    """Behind attention, in a window of any size; where it may not be forked, whoever asks does it at once."""
    for window, records in ((2, True), (1, False)):
        order, streams = new_order(window)
        assert not order.may_fork(alone=True)
        one_pass(order, streams, capture=False)
        streams.is_capturing = True
        log = streams.log
        log.clear()
        for layer in "abc":
            order.written(layer, lambda aside, layer=layer, log=log: log.append(f"encode {layer}"), alone=True)
            order.selected()
            log.append(f"attend {layer}")
            assert order.may_fork(alone=True)
            assert not order.may_fork(alone=False)
            order.fork(lambda layer=layer, log=log: log.append(f"copy {layer}"))
            order.attended(layer)
        at = log.index("join")
        assert log.index("attend c") < at
        done = log[at + 1 :]
        assert done == [f"{what} {layer}" for layer in "abc" for what in (("encode", "copy") if records else ("copy",))]
        assert order.forked == (3 if records else 0)
        assert not order.may_fork(alone=True), "the side stream was joined"
        streams.is_capturing = False
        assert not order.may_fork(alone=True)


def test_the_next_layer_waits_for_what_reads_the_selection_and_not_for_the_copies_behind_it():
    order, streams = new_order()
    log = streams.log

    def layers(names: str) -> None:
        log.clear()
        for layer in names:
            log.append(f"write {layer}{' in order' if order.begins(layer) else ''}")
            order.written(layer, lambda aside, layer=layer: log.append(f"encode {layer}"), alone=True)
            order.selected((lambda layer=layer: log.append(f"choose {layer}")) if streams.is_capturing else None)
            log.append(f"attend {layer}")
            if streams.is_capturing:
                order.fork(lambda layer=layer: log.append(f"copy {layer}"))
            order.attended(layer)

    layers("ab")
    assert log == ["write a", "encode a", "attend a", "write b", "encode b", "attend b"]
    streams.is_capturing = True
    forked = [
        "write a", "fork", "fork", "attend a", "fork", "wait", "encode a", "choose a", "write b in order", "fork", "fork", "attend b", "fork",
        "join", "copy a", "encode b", "choose b", "copy b",
    ]
    for _ in range(2):
        layers("ab")
        assert log == forked, "and the first layer of a step waits for nothing"
    for layer in "ab":
        order.begins(layer)
        order.written(layer, lambda aside: None, alone=True)
        order.selected(lambda layer=layer: layer == "b" and pytest.fail("of a pass that has failed"))  # and then something raised
    streams.forked.clear()
    layers("ab")
    assert log == forked


def test_attention_forks_what_nobody_has_forked():
    order, streams = new_order()
    one_pass(order, streams, capture=False, layers="a")
    streams.is_capturing = True
    streams.log.clear()
    order.written("a", lambda aside: streams.log.append(f"encode {aside}"), alone=True)
    order.attended("a")
    assert streams.log == ["fork", "join", "encode True"]


def test_a_graph_of_the_write_without_attention_is_refused():
    """Its records would be made once, while it is captured, and never again."""
    order, streams = new_order()
    one_pass(order, streams, capture=False, layers="a")
    streams.is_capturing = True
    order.written("a", lambda aside: None, alone=True)
    streams.is_capturing = False
    with pytest.raises(RuntimeError, match="records would be missing"):
        order.selected()
    assert streams.log[-1] != "fork"


def test_one_layer_alone_is_first_and_last():
    order, streams = new_order()
    one_pass(order, streams, capture=False, layers="a")
    assert one_pass(order, streams, capture=True, layers="a") == ["write a", "select a", "fork", "attend a", "join", "encode a aside"]


# In an engine


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def give_streams(engine: MiniEngine, at_once: bool = False) -> Streams:
    streams = Streams(at_once)
    engine.state.encode_order.streams = streams
    return streams


def shared_page_scenario(engine: MiniEngine, streams: Streams | None) -> list[torch.Tensor]:
    """A row that fills page after page, and another one that finds all but the last token of its prompt in the block that is being filled."""
    a = Request(3)
    engine.step([(a, 639)])
    results = []
    for step in range(40):
        rows = [(a, 1)]
        if (a.computed + 1) % 16 == 0 and step:
            engine.grow(a, 1)
            b = Request(3, computed=a.computed + 1, blocks=list(a.blocks))
            rows.append((b, 1))
        if streams is not None:
            streams.is_capturing = True
        results += [out for layers in engine.step(rows) for out in layers]
        if streams is not None:
            streams.is_capturing = False
        for request, _ in rows[1:]:
            engine.free.append(request.blocks[-1])
    per_page = torch.tensor([a.blocks[p] for p in range(a.computed // 16)])
    assert probe.untrue_records(engine.state, per_page) == dict.fromkeys(engine.state.layers, 0)
    return results


@pytest.mark.parametrize("together", [False, True], ids=["in every layer", "together"])
def test_attention_and_records_are_those_of_records_made_at_once(together, monkeypatch):
    monkeypatch.setattr(state_module, "encoded_together", lambda layer, kernels: together)
    plain, aside = MiniEngine(FEW), MiniEngine(FEW)
    expected = shared_page_scenario(plain, None)
    streams = give_streams(aside)
    results = shared_page_scenario(aside, streams)
    assert streams.log.count("join") == 40
    assert streams.log.count("fork") == 40 * (1 if together else len(aside.layers))
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(results, expected, strict=True))


@pytest.mark.parametrize("together", [False, True], ids=["in every layer", "together"])
def test_latent_attention_makes_records_aside_too(together, monkeypatch):
    monkeypatch.setattr(state_module, "encoded_together", lambda layer, kernels: together)

    def run(engine: MlaMiniEngine) -> list[torch.Tensor]:
        a, b = Request(3), Request(4)
        engine.step([(a, 250), (b, 60)])
        return [out for _ in range(20) for layers in engine.step([(a, 1), (b, 1)]) for out in layers]

    plain, aside = MlaMiniEngine(FEW), MlaMiniEngine(FEW)
    expected = run(plain)
    streams = give_streams(aside)
    streams.is_capturing = True
    results = run(aside)
    assert streams.log.count("join") == 20
    assert streams.log.count("fork") == 20 * (1 if together else len(aside.layers))
    assert aside.state.encode_order.forked == len(aside.layers)
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(results, expected, strict=True))


def test_prefill_beside_decode_rows_makes_records_at_once():
    engine = MiniEngine(FEW)
    streams = give_streams(engine)
    a, b = Request(4), Request(5)
    engine.step([(a, 400)])
    streams.is_capturing = True
    engine.step([(a, 1), (b, 100)])
    assert streams.log == []
    engine.step([(a, 1), (b, 1)], pad_rows=2)
    assert streams.log == ["fork", "fork", "join"]
    engine.step([(a, 3)])  # rows of several tokens are FlashAttention's
    assert streams.log == ["fork", "fork", "join"]


def test_the_window_of_the_configuration_decides():
    engine = MiniEngine({**FEW, "window_pages": 1})
    streams = give_streams(engine)
    a = Request(4)
    engine.step([(a, 400)])
    streams.is_capturing = True
    engine.step([(a, 1)])
    assert streams.log == []


def test_a_step_is_of_decode_rows_alone_where_its_metadata_says_so():
    engine = MiniEngine(FEW)
    name = engine.layers[0].layer_name
    assert not facts.decodes_alone(name), "no step is under way"
    engine.step([(Request(6), 1), (Request(7), 1)])
    with set_forward_context({name: engine.metadata}, engine.config):
        assert facts.decodes_alone(name)
        assert not facts.decodes_alone("another layer")
    with set_forward_context(None, engine.config):
        assert not facts.decodes_alone(name), "a run that only warms up has no metadata"
    with set_forward_context({name: engine.metadata}, engine.config, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
        assert not facts.decodes_alone(name), "the graph of the write holds no attention"
    with set_forward_context([{name: engine.metadata}], engine.config):
        assert not facts.decodes_alone(name), "parts of a batch that take turns"
    engine.step([(Request(8), 1), (Request(9), 20)])
    with set_forward_context({name: engine.metadata}, engine.config):
        assert not facts.decodes_alone(name)


def write_as_on_a_gpu(engine: MiniEngine, monkeypatch, serves=lambda: True) -> list[bool]:
    """From now on an engine writes as with the CUDA kernels, by the torch operation; returned is where it has said that the launch may begin early."""
    overlaps, write = [], engine.state.write

    def served(*tensors, kernels, overlap):
        if serves():
            overlaps.append(overlap)
            return write_cache(*tensors, kernels="torch")
        return False

    def with_cuda(*arguments, **more):
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "write_cache", served)
            patch.setattr(engine.state, "kernels", Choice("cuda", ""))
            return write(*arguments, **more)

    monkeypatch.setattr(engine.state, "write", with_cuda)
    return overlaps


def test_only_steps_of_decode_rows_alone_write_keys_with_the_kernel_that_lets_others_in(monkeypatch):
    """And what it does not take, vLLM writes: results are the same."""
    plain, engine = MiniEngine(FEW), MiniEngine(FEW)
    written: list[tuple[str, int]] = []
    serves = [True]

    def write(layer, key, value, kv_cache, slots, *, overlap):
        assert overlap, "nothing was decided beside attention"
        if serves[0]:
            written.append((layer.name, int((slots >= 0).sum())))
            cache, room = layer.views(kv_cache)
            write_cache(key, value, cache, room, slots, kernels="torch")
        return serves[0]

    monkeypatch.setattr(engine.state, "write", write)
    names = list(engine.state.layers)
    for taken, scheduled, rows in ((True, [(5, 100), (6, 40)], 0), (True, [(5, 1), (6, 1)], 2), (True, [(5, 1), (6, 20)], 0), (False, [(5, 1), (6, 1)], 0)):
        serves[0] = taken
        written.clear()
        results = []
        for one in (plain, engine):
            requests = one.__dict__.setdefault("requests", {seed: Request(seed) for seed in (5, 6)})
            results.append([out for layers in one.step([(requests[seed], count) for seed, count in scheduled], pad_rows=2 if rows else 0) for out in layers])
        assert written == [(name, rows) for name in names if rows]
        assert all(torch.equal(actual, wanted) for actual, wanted in zip(*results, strict=True))


def test_the_step_behind_that_write_reads_its_queries_early_and_no_other(monkeypatch):
    engine, told, serves = MiniEngine(FEW), [], [True]
    decode_step = state_module.decode_step

    def seen(*tensors, queries_settled, **settings):
        told.append(queries_settled)
        decode_step(*tensors, queries_settled=queries_settled, **settings)

    monkeypatch.setattr(state_module, "decode_step", seen)
    write_as_on_a_gpu(engine, monkeypatch, lambda: serves[0])
    monkeypatch.setattr(engine.state, "rows", 2)
    requests = [Request(seed) for seed in (5, 6, 7)]
    engine.step([(request, 40) for request in requests])
    for serves[0], scheduled, wanted in (
        (True, [1, 1, 1], [True, False]), (True, [1, 1, 30], [False]), (False, [1, 1, 1], [False, False]), (True, [1], [True]),
    ):
        told.clear()
        engine.step(list(zip(requests, scheduled)))
        assert told == wanted * len(engine.layers), "of each part of the rows in turn"


def test_the_write_that_lets_others_in_is_the_cuda_kernel_or_nothing(monkeypatch):
    engine = MiniEngine(FEW)
    layer = next(iter(engine.state.layers.values()))
    cache, rows = layer.module.kv_cache, torch.ones(1, 2, 64)
    slots = torch.tensor([40])
    assert not engine.state.write(layer, rows, rows, cache, slots, overlap=True)
    assert cache.isnan().all()
    seen = []
    monkeypatch.setattr(state_module, "write_cache", lambda *tensors, kernels, overlap: seen.append((kernels, overlap)) or True)
    monkeypatch.setattr(engine.state, "kernels", Choice("cuda", ""))
    for overlap in (True, False):
        assert engine.state.write(layer, rows, rows, cache, slots, overlap=overlap)
    assert seen == [("cuda", True), ("cuda", False)]


def test_what_that_kernel_does_not_take_is_said_once(monkeypatch):
    engine, said = MiniEngine(FEW), []
    monkeypatch.setattr(engine.state, "log", said.append)
    monkeypatch.setattr(engine.state, "kernels", Choice("cuda", ""))
    layer = next(iter(engine.state.layers.values()))
    rows = torch.ones(1, 2, 64, dtype=torch.bfloat16)
    for _ in range(2):
        assert not engine.state.write(layer, rows, rows, layer.module.kv_cache, torch.tensor([40]), overlap=True)
    assert len(said) == 1
    assert "torch.bfloat16 in a cache of torch.float32" in said[0]
