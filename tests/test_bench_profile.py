"""`kvskim bench e2e --profile`: kernels of a step become groups that add up to its time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvskim.ops
from kvskim.bench import step_profiler
from kvskim.bench.e2e_plan import DENSE, KVSKIM, Job
from kvskim.bench.e2e_profile_tables import profile_tables
from kvskim.bench.e2e_report import Row
from kvskim.bench.kernel_groups import GROUPS, SMALL, UNKNOWN, kernel_group, short_name
from kvskim.bench.step_profile import Gap, Interval, intervals_of, shares, step_profile, unknown_kernels
from kvskim.bench.step_profiler import DROPPED_STEPS, PROFILED_STEPS, SETTLING_STEPS, StepProfiler

MARKER = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def step(start: float, *kernels: tuple[str, float, float]) -> list[Interval]:
    """A step: its marker of 2 us, then kernels with start and end counted from the end of the marker."""
    return [Interval(MARKER, start, start + 2)] + [Interval(name, start + 2 + first, start + 2 + last) for name, first, last in kernels]


# ---------------------------------------------------------------------- time
def test_overlapped_kernels_are_counted_once_for_the_one_that_started_first() -> None:
    intervals = [Interval("b", 5, 12), Interval("a", 0, 10), Interval("inside", 6, 8), Interval("c", 12, 15), Interval("last", 13, 14), Interval("d", 20, 40)]
    found, gaps = shares(intervals, 0, 30)
    assert {share.interval.name: share.us for share in found} == {"a": 10, "b": 2, "inside": 0, "c": 3, "last": 0, "d": 10}
    # What ended last is before the gap, not what started last.
    assert gaps == [Gap(5, "c", "d")]
    assert sum(share.us for share in found) + sum(gap.us for gap in gaps) == 30


def test_what_lies_outside_is_left_out() -> None:
    found, gaps = shares([Interval("before", 0, 4), Interval("across", 3, 11), Interval("after", 20, 22)], 10, 20)
    assert [(share.interval.name, share.us) for share in found] == [("across", 1)]
    assert gaps == [Gap(9, "across", "")]
    assert shares([], 10, 20) == ([], [Gap(10, "", "")])


def test_a_step_adds_up() -> None:
    kernels = (("nvjet_a", 0, 10), ("select_kernel", 8, 14), ("strange", 15, 18), ("nvjet_a", 38, 40))
    recorded = step(0, ("dropped", 0, 90)) + step(100, *kernels) + step(150, *kernels) + step(200, ("late", 0, 9))
    profile = step_profile(recorded[::-1], dropped=1)
    # 48 us from the end of one marker to the start of the next.
    assert (profile["steps"], profile["step_us"]) == (2, 48)
    assert profile["busy_us"] + profile["gaps_us"] + profile["waits_us"] == profile["step_us"]
    # 18 to 38 and 40 to 48; the one of 1 us is no wait.
    assert (profile["gaps_us"], profile["waits_us"]) == (1, 20 + 8)
    assert [(group["group"], group["us"], group["launches"]) for group in profile["groups"]] == [("linear layers", 12, 2), ("select", 4, 1), (UNKNOWN, 3, 1)]
    assert [(row["name"], row["us"], row["launches"]) for row in profile["kernels"]] == [("nvjet_a", 12, 2), ("select_kernel", 4, 1), ("strange", 3, 1)]
    between = [("strange", "nvjet_a", 20, 1), ("nvjet_a", "", 8, 1), ("select_kernel", "strange", 1, 1)]
    assert [(gap["before"], gap["after"], gap["us"], gap["count"]) for gap in profile["gaps"]] == between
    assert unknown_kernels(profile) == ["strange"]
    assert "dropped" not in str(profile)
    assert "late" not in str(profile)


@pytest.mark.parametrize("recorded", [[], step(0, ("a", 0, 1)), step(0) + step(10)])
def test_a_recording_without_steps_is_no_profile(recorded: list[Interval]) -> None:
    with pytest.raises(ValueError, match="so there is none to look at"):
        step_profile(recorded, dropped=1)


def test_traces_are_read() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5140829273458.5, "dur": 1.25}, {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "ts": 3, "dur": 2},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 9}, {"ph": "M", "name": "process_name"},
        {"ph": "f", "cat": "kernel", "name": "flow", "ts": 1},
    ]
    assert intervals_of({"traceEvents": events}) == [Interval("k", 5140829273458.5, 5140829273459.75), Interval("Memcpy", 3, 5, "gpu_memcpy")]


# ---------------------------------------------------------------------- names
@pytest.mark.parametrize(("name", "group"), [
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "linear layers"), ("void cublasLt::splitKreduce_kernel<32, 16, int>(int)", "linear layers"),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(float)", "linear layers"), ("triton_tem_fused_mm_3", "linear layers"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x> > >(x)", "attention"),
    ("void flash::prepare_varlen_num_blocks_kernel<1>(int)", "attention"), ("void vllm::merge_attn_states_kernel<float>(float)", "attention"),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)", "cache write"),
    ("kvskim::write_cache_kernel(kvskim::WriteArguments)", "cache write"), ("void vllm::concat_and_cache_mla_kernel<x>(x)", "cache write"),
    ("fused_moe_kernel", "experts"), ("void vllm::moe::topkGating<8, 64>(float)", "experts"),
    ("void vllm::moe::count_and_sort_expert_tokens_kernel<int>", "experts"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_topk_1", SMALL), ("void vllm::rms_norm_kernel<c10::BFloat16>(x)", SMALL),
    ("void vllm::rotary_embedding_kernel<x>(x)", SMALL), ("void at::native::vectorized_elementwise_kernel<4, x>(x)", SMALL),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >(x)", "sampling"),
    ("_gumbel_sample_kernel", "sampling"),
    ("_combine_sampled_and_draft_tokens_kernel", "step preparation"), ("_compute_slot_mappings_kernel", "step preparation"),
    ("_gather_block_tables_kernel", "step preparation"), ("_prepare_pos_seq_lens_kernel", "step preparation"), ("_post_update_kernel", "step preparation"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "communication"),
    ("void kvskim::(anonymous namespace)::prepare_sketch_kernel<128>(x)", "score preparation"), ("_forced_kernel", "score preparation"),
    ("void kvskim::score_sketch_kernel<8, 2>(x)", "score"), ("void kvskim::attend_kernel<128>(x)", "attend"), ("latent_split_kernel", "attend"),
    ("memcpy32_post", "copies"),
    ("void someone::new_kernel(int)", UNKNOWN),
])
def test_names_are_known(name: str, group: str) -> None:
    assert kernel_group(name) == group
    assert group in GROUPS


def test_copies_are_told_by_their_kind() -> None:
    assert kernel_group("Memcpy DtoD", "gpu_memcpy") == kernel_group("Memset (Device)", "gpu_memset") == "copies"


def own_kernels() -> list[str]:
    """Names of all kernels of this project, in CUDA and in Triton."""
    folder = Path(next(iter(kvskim.ops.__path__)))
    names = []
    for path in sorted([*folder.glob("cuda/*.cu"), *folder.glob("cuda/*.cuh")]):
        names += re.findall(r"__global__[^;{]*?\b(\w+_kernel)\s*\(", path.read_text(encoding="utf-8"))
    for path in sorted(folder.glob("triton/*.py")):
        names += re.findall(r"@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\(", path.read_text(encoding="utf-8"))
    return names


def test_every_kernel_of_ours_has_a_group_of_ours() -> None:
    names = own_kernels()
    assert {"score_sketch_kernel", "select_kernel", "attend_kernel", "_merge_kernel"} <= set(names)
    ours = {"cache write", "encode", "score preparation", "score", "select", "values in host memory", "attend"}
    assert {name for name in names if kernel_group(name) not in ours} == set()


def test_short_names() -> None:
    assert short_name("void kvskim::(anonymous namespace)::encode<1>(int)") == "kvskim::encode<1>(int)"
    assert len(short_name("x" * 500)) == 90


# ---------------------------------------------------------------------- recording
class Recorder:
    """Takes note of what happens, and returns a trace of as many steps of 10 us as there are marks."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")

    def mark(self) -> None:
        self.log.append("mark")

    def stop(self) -> dict[str, Any]:
        self.log.append("stop")
        marks = [{"ph": "X", "cat": "kernel", "name": MARKER, "ts": 10.0 * i, "dur": 1.0} for i in range(self.log.count("mark"))]
        return {"traceEvents": [*marks, *({**mark, "name": "nvjet", "ts": mark["ts"] + 1, "dur": 6.0} for mark in marks)]}


class Worker:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def execute_model(self, scheduled: Any) -> str:
        self.log.append("step")
        return "output"


def run_steps(*rows: tuple[int, int], requests: int = 2) -> tuple[Recorder, Worker, StepProfiler]:
    """Steps with so many requests and tokens."""
    recorder = Recorder()
    worker = Worker(recorder.log)
    profiler = StepProfiler(worker, requests, recorder)
    for count, tokens in rows:
        scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(range(count), 1), total_num_scheduled_tokens=tokens)
        assert worker.execute_model(scheduled) == "output"
    return recorder, worker, profiler


def test_decode_steps_of_the_whole_batch_are_recorded() -> None:
    starting = [(2, 2)] * 3 + [(1, 1), (2, 900)]
    recorder, worker, profiler = run_steps(*starting, *[(2, 2)] * 60)
    log = recorder.log
    assert log.index("start") == len(starting) + SETTLING_STEPS
    recorded = log[log.index("start") + 1 : log.index("stop")]
    # Each mark is followed by its step, but for the last one, which ends the recording.
    assert recorded == ["mark", "step"] * (DROPPED_STEPS + PROFILED_STEPS) + ["mark"]
    assert log.count("step") == len(starting) + 60
    assert "execute_model" not in vars(worker)
    profile = profiler.result()
    assert (profile["steps"], profile["step_us"], profile["gaps_us"]) == (PROFILED_STEPS, 9, 3)


@pytest.mark.parametrize("rows", [[(2, 2)] * (SETTLING_STEPS + 5), [(2, 2)] * (SETTLING_STEPS + 5) + [(1, 1)] * 60, [(1, 1)] * 60])
def test_steps_that_end_too_early_give_no_profile(rows: list[tuple[int, int]]) -> None:
    recorder, worker, profiler = run_steps(*rows)
    with pytest.raises(RuntimeError, match="decode steps in a row with 2 requests were not seen"):
        profiler.result()
    assert "execute_model" not in vars(worker)
    assert recorder.log.count("step") == len(rows)


def test_a_profile_fits_into_the_longer_output() -> None:
    for batch in (1, 32, 256):
        long = Job("profile", batch, 1 << 20).output_lengths[1]
        # Requests of a batch start one after the other, at worst one in each step.
        assert batch + SETTLING_STEPS + DROPPED_STEPS + PROFILED_STEPS + 1 < long
        assert step_profiler.PROFILED_STEPS >= 8


# ---------------------------------------------------------------------- tables
def profile(us: float, *names: str) -> dict[str, Any]:
    kernels = [dict(name=name, group=kernel_group(name), us=us, launches=2.0) for name in names]
    groups = [dict(group=kernel["group"], us=us, launches=2.0) for kernel in kernels]
    return dict(steps=4, step_us=us * len(names) + 30.0, busy_us=us * len(names), gaps_us=10.0, waits_us=20.0, groups=groups, kernels=kernels)


def case(kind: str, dense: Any, kvskim: Any, **more: Any) -> Row:
    return Row("m", "dummy", more.pop("selector", "sketch"), Job(kind, 1, 16384), dense, kvskim, **more)


def test_tables_add_up_to_the_measured_time() -> None:
    found = [
        case("decode", {"tpot_ms": 0.36}, {"tpot_ms": 0.2}), case("decode", None, {"tpot_ms": 9.0}, selector="rki4"),
        case("profile", profile(100.0, "nvjet", "flash", "odd<1>"), profile(25.0, "nvjet", "select_kernel")),
    ]
    groups, unknown, kernels = profile_tables(found, kernels=True)
    assert "m, 1 x 16K, sketch" in groups.title
    lines = {row[0]: row[1:] for row in groups.cells}
    assert lines["attention"] == ("100.0", "2.0", "", "")
    assert lines["select"] == ("", "", "25.0", "2.0")
    assert lines["sum: the step under the profiler"] == ("330.0", "", "80.0", "")
    assert lines["measured without the profiler minus that"] == ("30.0", "", "120.0", "")
    assert lines["sum: time per token as measured"] == ("360.0", "", "200.0", "")
    for column in (1, 3):
        parts = [float(row[column]) for row in groups.cells if row[column] and not row[0].startswith("sum")]
        assert sum(parts) == pytest.approx(float(lines["sum: time per token as measured"][column - 1]))
    assert unknown.cells == [(DENSE, "odd<1>")]
    assert (KVSKIM, "select", "select_kernel", "25.0", "2.0") in kernels.cells
    assert len(profile_tables(found, kernels=False)) == 2


def test_a_profile_without_its_measurement_or_with_one_side() -> None:
    alone = case("profile", None, profile(25.0, "nvjet"), dense_error="no room")
    [groups] = profile_tables([alone], kernels=False)
    assert groups.cells[0] == ("failed", "failed: no room", "", "", "")
    assert groups.cells[-1] == ("sum: the step under the profiler", "", "", "55.0", "")
    # The dense engine's time counts, whichever selector it stands beside.
    beside = case("decode", {"tpot_ms": 0.36}, None, selector="rki4")
    [groups] = profile_tables([beside, case("profile", profile(100.0, "nvjet"), None, selector="")], kernels=False)
    assert groups.cells[-1][:2] == ("sum: time per token as measured", "360.0")
    assert json.loads(json.dumps(alone.kvskim)) == alone.kvskim
