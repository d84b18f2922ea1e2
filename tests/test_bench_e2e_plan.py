"""`kvskim bench e2e`: what its options ask for, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvskim.bench import e2e_plan as plan
from kvskim.bench.e2e_plan import Job
from kvskim.bench.geometries import GEOMETRIES, LONGEST, write_geometry
from kvskim.bench.page_slots import page_ends, token_slots
from kvskim.errors import KvskimError


def shapes(jobs: list[Job]) -> list[tuple[int, int]]:
    return [(job.batch, job.context) for job in jobs]


def test_cases_are_read() -> None:
    assert shapes(plan.decode_jobs("1x16384, 4X128k,1x1M,4x131072", None, None)) == [(1, 16384), (4, 131072), (1, 1 << 20)]
    assert shapes(plan.decode_jobs(None, "1,4", "16K,32768")) == [(1, 16384), (4, 16384), (1, 32768), (4, 32768)]
    assert shapes(plan.decode_jobs(None, None, "16K")) == [(1, 16384)]
    assert plan.decode_jobs(None, None, None) == []
    assert [job.context for job in plan.ttft_jobs("32768,128K,32K")] == [32768, 131072]


@pytest.mark.parametrize(("arguments", "words"), [
    (("1y16384", None, None), "--cases has '1y16384'"), (("1x", None, None), "--cases has ''"), (("0x16K", None, None), "--cases has '0'"),
    (("1x16K", "1", None), "--cases excludes"), ((None, "1", None), "--batch needs --ctx"), ((None, "1,b", "16K"), "--batch has 'b'"),
    ((None, "1", "1.5K"), "--ctx has '1.5k'"), (("1x512", None, None), "at least 1024"), (("600x1024", None, None), "with a batch of 600"),
])
def test_bad_cases_are_refused_in_one_sentence(arguments: tuple[str | None, str | None, str | None], words: str) -> None:
    with pytest.raises(KvskimError) as caught:
        plan.decode_jobs(*arguments)
    assert words.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_requests_of_a_batch_have_time_to_run_together() -> None:
    for batch in (1, 8, 32, 256):
        first, second = Job("decode", batch, 1 << 20).output_lengths
        # At worst one request starts in each step.
        assert first > batch
        assert second - first == plan.EXTRA_STEPS


def test_profiles_are_of_the_decode_cases() -> None:
    assert plan.profile_jobs(plan.decode_jobs("1x16K,4x128K", None, None)) == [Job("profile", 1, 16384), Job("profile", 4, 131072)]
    assert plan.profile_jobs([Job("decode", 4, 131072)])[0].tokens == 131072
    with pytest.raises(KvskimError, match="--profile looks at decode cases, and there are none"):
        plan.profile_jobs([])


def load(**options: object) -> Job:
    return plan.load_jobs("32x32768", **options)[0]  # type: ignore[arg-type]


def test_load_is_read() -> None:
    job = load()
    assert (job.batch, job.context, job.requests, job.prefill, job.shortest, job.longest, job.rate) == (32, 32768, 96, 2048, 64, 448, 0.0)
    assert job.tokens == 32768 + 448
    assert load(prefill="real").prefill == load(real=True).prefill == load(real=True, prefill="real").prefill == -1
    assert plan.load_jobs(None, real=True) == []
    assert load(prefill="fill").prefill == 1
    assert load(requests=7, rate=2.5) == Job("load", 32, 32768, 7, 2048, 64, 448, 2.5)


@pytest.mark.parametrize(("options", "words"), [
    ({"prefill": "64K"}, "--load-prefill is 64K"), ({"prefill": "some"}, "--load-prefill has 'some'"), ({"output": "9,4"}, "--load-output is '9,4'"),
    ({"output": "9"}, "--load-output is '9'"), ({"rate": 0.0}, "--load-rate is 0.0"), ({"requests": 0}, "--load-requests is 0"),
    ({"prefill": "2048", "real": True}, "--load-prefill is 2048; with --real whole prompts are computed"),
])
def test_bad_load_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(KvskimError, match=words):
        load(**options)


@pytest.mark.parametrize("option", ["requests", "prefill", "output", "rate"])
def test_options_of_a_load_need_one(option: str) -> None:
    with pytest.raises(KvskimError, match=f"--load-{option} needs --load"):
        plan.load_jobs(None, **{option: 4})  # type: ignore[arg-type]


def test_one_engine_serves_all_jobs() -> None:
    jobs = [Job("decode", 4, 131072), Job("ttft", 1, 262144), load()]
    filled = plan.engine_arguments(jobs, real=False, memory=0.8, blocks=None)
    assert filled["max_model_len"] == 262144 + 16
    assert filled["max_num_seqs"] == 32
    assert filled["gpu_memory_utilization"] == 0.8
    assert filled["load_format"] == "dummy"
    assert filled["enable_prefix_caching"] is False
    assert "num_gpu_blocks_override" not in filled
    assert "tensor_parallel_size" not in filled
    split = plan.engine_arguments(jobs, real=False, memory=0.8, blocks=None, tensor_parallel=2)
    assert split == {**filled, "tensor_parallel_size": 2}
    real = plan.engine_arguments(jobs[:1], real=True, memory=0.8, blocks=77)
    assert real["max_model_len"] == 131072
    assert real["num_gpu_blocks_override"] == 77
    assert real["enable_prefix_caching"] is True
    assert not {"load_format", "kv_transfer_config"} & set(real)


def test_models_are_found(tmp_path: Path) -> None:
    for name in GEOMETRIES:
        assert plan.find_model(name, real=False) == plan.Model(name, None, LONGEST, name == "deepseek-v2-lite", heads=16 if "lite" in name else 32)
    folder = write_geometry("qwen3-8b", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": {**settings, "max_position_embeddings": 40960}}))
    found = plan.find_model(str(folder), real=True)
    assert (found.name, found.folder, found.positions, found.latent) == ("qwen3-8b", folder.resolve(), 40960, False)
    plan.check_positions(found, [Job("decode", 1, 40960)])
    with pytest.raises(KvskimError, match="1 x 64K needs 65536 positions, and qwen3-8b has 40960"):
        plan.check_positions(found, [Job("decode", 1, 16384), Job("decode", 1, 65536)])
    with pytest.raises(KvskimError, match="nothing to measure"):
        plan.check_positions(found, [])
    assert plan.find_model(str(write_geometry("deepseek-v2-lite", tmp_path)), real=True).latent is True


@pytest.mark.parametrize(("heads", "gpus", "fits"), [(9, 1, True), (9, 2, False), (9, 3, True), (32, 8, True), (None, 7, True)])
def test_a_model_is_split_as_its_heads_allow(heads: int | None, gpus: int, fits: bool) -> None:
    model = plan.Model("m", None, LONGEST, heads=heads)
    if fits:
        plan.check_tensor_parallel(model, gpus)
    else:
        with pytest.raises(KvskimError, match="--tensor-parallel is 2; m has 9 query heads"):
            plan.check_tensor_parallel(model, gpus)


@pytest.mark.parametrize(("name", "real", "words"), [
    ("llama4", False, "neither a geometry .* nor a folder"), ("llama3.1-8b", True, "geometry without weights"),
])
def test_unknown_models_are_refused(name: str, real: bool, words: str) -> None:
    with pytest.raises(KvskimError, match=words):
        plan.find_model(name, real=real)


def test_a_folder_that_holds_no_readable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KvskimError, match=r"config\.json can't be read"):
        plan.find_model(str(tmp_path), real=False)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_transformers_knows_the_geometries(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(write_geometry(name, tmp_path)), local_files_only=True)
    if name == "deepseek-v2-lite":
        assert (config.model_type, config.num_hidden_layers, config.num_attention_heads) == ("deepseek_v2", 27, 16)
        assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank) == (512, 64, 128, 128, None)
        assert (config.n_routed_experts, config.num_experts_per_tok, config.first_k_dense_replace) == (64, 6, 1)
        assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
        return
    heads, layers, groups = {"glm4-9b-1m": (4, 40, 8), "llama3.1-8b": (8, 32, 4), "qwen3-8b": (8, 36, 4)}[name]
    assert (config.num_key_value_heads, config.num_hidden_layers, config.head_dim) == (heads, layers, 128)
    assert config.num_attention_heads == heads * groups
    assert config.model_type == {"glm4-9b-1m": "glm", "llama3.1-8b": "llama", "qwen3-8b": "qwen3"}[name]


def test_every_default_case_is_valid() -> None:
    for cases in (plan.QUICK_CASES, *plan.DEFAULT_CASES.values()):
        assert plan.decode_jobs(cases, None, None)
    assert set(plan.DEFAULT_CASES) == set(GEOMETRIES)


@pytest.mark.parametrize(("blocks", "size", "tokens", "expected"), [
    ([3, 1, 5], 16, 47, [63, 31]), ([3, 1, 5], 16, 48, [63, 31, 95]), ([3, 1], 32, 64, [111, 127, 47, 63]), ([3], 16, 15, []),
    ([2, 0], 64, 96, [143, 159, 175, 191, 15, 31]),
])
def test_page_ends(blocks: list[int], size: int, tokens: int, expected: list[int]) -> None:
    assert page_ends(blocks, size, tokens) == expected


def test_token_slots() -> None:
    assert token_slots([3, 1], 16, 18) == [*range(48, 64), 16, 17]
    assert token_slots([3], 16, 0) == []
