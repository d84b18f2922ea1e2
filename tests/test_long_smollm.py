"""The training recipe benchmarks/long-smollm: what its documents teach, where the loss is, and that adapters are stored and merged without a change."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = str(Path(__file__).parents[1] / "benchmarks" / "long-smollm")
sys.path.insert(0, FOLDER)
import documents  # noqa: E402
import feed as feeding  # noqa: E402
import forward  # noqa: E402
import low_rank  # noqa: E402
import train as training  # noqa: E402

from kvskim.errors import KvskimError  # noqa: E402
from kvskim.eval.ruler import make_samples  # noqa: E402
from kvskim.eval.sample import Sample  # noqa: E402
from kvskim.eval.texts import prose  # noqa: E402

sys.path.remove(FOLDER)

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and a byte-level tokenizer with a chat template, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    raw.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = prose()[:100_000].split("\n") + ["The secret number of uuid is. Which does the text mention? Give all of them. mentioned in the text are"] * 50
    raw.train_from_iterator(text, trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=specials[1], eos_token=specials[2], chat_template=TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1200, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True, initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def encoder(folder):
    from transformers import AutoTokenizer

    return documents.Encoder(AutoTokenizer.from_pretrained(folder))


def labels(encoder, encoded):
    """Texts of the answers, from the roles of the tokens."""
    found, current = [], []
    for token, role in zip([*encoded.ids, 0], [*encoded.roles, documents.NOTHING]):
        if role >= documents.ANSWER:
            current.append(token)
        elif current:
            found.append(encoder.tokenizer.decode(current))
            current = []
    return found


def right_answer(context, question):
    """The answer found in the context by other means than those that wrote it."""
    if "secret" in question.text:
        keys = re.split(", | and ", re.search(r"secret \w+ of (.*) does the text", question.text).group(1))
        values = [re.findall(rf"The secret (?:number|uuid) of {key} is (\S+)\.(?:\s|$)", context) for key in keys]
        assert all(values)
        flat = [one for several in values for one in several]
        assert set(flat) == set(question.references)
        return f" {', '.join(flat[:-1])} and {flat[-1]}." if len(flat) > 1 else f" {flat[0]}."
    if "Which variables" in question.text:
        value = re.search(r"\d{5}", question.text).group()
        body = context.split("Variables get values")[2]
        held, order = {}, []
        for line in re.findall(r"VAR \w+ = .*", body):
            name, source = line.removeprefix("VAR ").split(" = ")
            held[name] = held[source.removeprefix("VAR ")] if source.startswith("VAR") else source
            order += [name] * (held[name] == value)
        return f" {', '.join(order)}."
    if "company" in question.text:
        name = re.search(r"company (\w+)", question.text).group(1)
        about = next(line for line in context.split("\n") if line.startswith(f"The company {name} "))
        if "founder" not in question.text:
            return " " + re.search(r"in the town of (\w+)", about).group(1)
        founder = re.search(r"by (\w+ \w+)\.", about).group(1)
        return " " + re.search(rf"{founder} was born in the town of (\w+)", context).group(1)
    return " " + re.search(rf"^{re.escape(question.answer_prefix)} (\d+)$", context, re.MULTILINE).group(1)


KINDS = range(len(documents.MIXTURE))


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_that_are_learnt_are_right_and_the_prompt_is_that_of_the_evaluation(encoder, kind):
    several = 0
    for seed in range(3):
        document = documents.MIXTURE[kind][1](random.Random(seed), 12, 6)
        encoded = encoder.encode(document)
        several += len(document.turns) > 1
        for question, answer in document.turns:
            assert answer == right_answer(document.context, question)
            assert question.score(answer) == 1
        # In a list that is one message, only the last answer ends.
        ends = [document.separator is None or i == len(document.turns) - 1 for i in range(len(document.turns))]
        assert labels(encoder, encoded) == [answer + "<|im_end|>" * end for (_, answer), end in zip(document.turns, ends)]
        first = document.turns[0][0]
        before, after = encoder.prompts.parts(Sample("", document.context, (first,)), first)
        prompt = before + after
        assert encoded.ids[: len(prompt)] == prompt
        assert not any(encoded.roles[: len(prompt)])
        assert encoded.roles[len(prompt)] == documents.FIRST_ANSWER
        assert encoded.roles.count(documents.END) == sum(ends)
        if document.separator is None:
            chat = []
            for i, (question, answer) in enumerate(document.turns):
                chat += [("user", question.text if i else document.context + question.text), ("assistant", question.answer_prefix + answer)]
            rendered = encoder.tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in chat], tokenize=False)
            assert encoder.tokenizer.decode(encoded.ids) + "\n" == rendered
    assert several


def test_documents_fit_their_length_differ_and_come_again(encoder):
    ids, roles = documents.make_batch(encoder, 0, 3, 2048, 4096)
    again, _ = documents.make_batch(encoder, 0, 3, 2048, 4096)
    other, _ = documents.make_batch(encoder, 1, 3, 2048, 4096)
    assert ids.shape == roles.shape == (2, 2048)
    assert (ids == again).all()
    assert (ids != other).any(1).all()
    assert (ids[0] != ids[1]).any()
    for row, role in zip(ids, roles):
        last = int((role > 0).nonzero()[0].max())
        assert last >= 0.75 * 2048
        assert role[last] == documents.END
        assert row[last] == encoder.end
        assert (row[last:] == encoder.end).all()
        assert {documents.LANGUAGE, documents.FIRST_ANSWER} <= set(role.tolist())


@pytest.mark.parametrize("task", documents.NEEDLE_TASKS)
def test_held_out_samples_are_those_of_the_evaluation_with_a_right_answer(encoder, task):
    ids, roles = documents.held_out(encoder, task, 2048, 1)
    (sample,) = make_samples(task, 2048, 1, encoder.prompts, documents.HELD_OUT_SEED)
    before, after = encoder.prompts.parts(sample, sample.questions[0])
    prompt = before + after
    assert ids[0, : len(prompt)].tolist() == prompt
    (answer,) = labels(encoder, SimpleNamespace(ids=ids[0].tolist(), roles=roles[0].tolist()))
    assert answer == right_answer(sample.context, sample.questions[0]) + "<|im_end|>"


def test_a_tokenizer_without_chat_template_is_refused(encoder):
    from copy import deepcopy

    plain = deepcopy(encoder.tokenizer)
    plain.chat_template = None
    with pytest.raises(KvskimError, match="chat template"):
        documents.Encoder(plain)


@pytest.mark.parametrize("end", ["<|im_start|>", None])
def test_a_tokenizer_with_another_end_of_text_is_refused_before_the_workers_start(encoder, tmp_path, monkeypatch, end):
    from copy import deepcopy

    other = deepcopy(encoder.tokenizer)
    other.eos_token = end
    other.save_pretrained(tmp_path)
    monkeypatch.setattr(feeding, "ProcessPoolExecutor", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(KvskimError, match="end-of-text token") as error:
        feeding.Feed(str(tmp_path), 2, 0, 1024, lambda: 0.0)
    assert "\n" not in str(error.value)


class Oracle:
    """A model whose hidden state at a place is the token that comes next."""

    def model(self, input_ids, use_cache):
        following = torch.nn.functional.one_hot(torch.roll(input_ids, -1, 1), 1200).float()
        return SimpleNamespace(last_hidden_state=following)

    def lm_head(self, hidden):
        return hidden


def test_a_token_is_predicted_from_the_state_before_it():
    ids, roles = torch.randint(3, 1200, (2, 50), generator=torch.Generator().manual_seed(0)), torch.zeros(2, 50, dtype=torch.int64)
    roles[0, 10:15], roles[1, 49] = documents.ANSWER, documents.END
    logits, wanted, role = forward.predictions(Oracle(), ids, roles)
    assert wanted.tolist() == [*ids[0, 10:15].tolist(), ids[1, 49].item()]
    assert (logits.argmax(-1) == wanted).all()
    assert role.tolist() == [documents.ANSWER] * 5 + [documents.END]


def options(folder, output, *more):
    return training.parse(
        ["--model", folder, "--output", str(output), "--longest", "1024", "--step-scale", "0.0625", "--workers", "0", "--held-out", "1", "--rank", "4",
         "--mlp-rank", "2", "--log-seconds", "0", "--lr", "0.02", "--seconds", "1000", *more]
    )  # fmt: skip


def test_exact_match_counts_samples_with_all_tokens_right(folder, tmp_path, monkeypatch):
    trainer = training.Trainer(options(folder, tmp_path), torch.device("cpu"))
    ids = torch.randint(3, 1200, (4, 40), generator=torch.Generator().manual_seed(0))
    roles = torch.zeros(4, 40, dtype=torch.int64)
    roles[:, 20:30], roles[:, 30], roles[:, 5] = documents.FIRST_ANSWER, documents.END, documents.LANGUAGE

    def predict(model, ids, roles):
        logits, wanted, role = forward.predictions(Oracle(), ids, roles)
        wrong = (wanted == unlucky).nonzero()
        logits[wrong, unlucky] = -1.0
        return logits, wanted, role

    unlucky = ids[2, 25].item()
    assert (ids == unlucky).sum() == 1
    monkeypatch.setattr(training, "predictions", predict)
    trainer.micro_tokens = 80  # two at a time
    assert trainer.exact(ids.int().numpy(), roles.byte().numpy(), 40) == 0.75


def test_parts_of_a_batch_give_the_gradient_of_the_whole(folder, tmp_path, encoder):
    trainer = training.Trainer(options(folder, tmp_path), torch.device("cpu"))
    trainer.model.float()
    batch = feeding.Batch(0, 1024, *documents.make_batch(encoder, 0, 0, 1024, 3072))
    whole = trainer.gradients(batch)
    wanted = [p.grad.clone() for p in trainer.parameters if p.grad is not None]
    trainer.optimizer.zero_grad()
    trainer.micro_tokens = 1024
    parts = trainer.gradients(batch)
    assert parts == pytest.approx(whole, rel=1e-4)
    for got, want in zip([p.grad for p in trainer.parameters if p.grad is not None], wanted):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_memory_and_kernel_failures_are_met_with_smaller_parts_and_another_kernel(folder, tmp_path, encoder, monkeypatch):
    trainer = training.Trainer(options(folder, tmp_path), torch.device("cpu"))
    batch = feeding.Batch(0, 1024, *documents.make_batch(encoder, 0, 0, 1024, 4096))
    flash, other = torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH
    monkeypatch.setattr(forward.Attention, "backends", (torch.nn.attention.SDPBackend.CUDNN_ATTENTION, flash, other))
    whole, failures, lines = trainer.gradients, [torch.OutOfMemoryError("full"), torch.OutOfMemoryError("full"), RuntimeError("no plan")], []

    def failing(batch):
        if failures:
            raise failures.pop(0)
        return whole(batch)

    monkeypatch.setattr(trainer, "gradients", failing)
    before = trainer.parameters[-1].clone()
    numbers = trainer.step(batch, 1.0, lines.append)
    assert trainer.micro_tokens == 1024
    assert forward.Attention.backends == (flash, other)
    assert [line.split()[0] for line in lines] == ["out", "out", "attention"]
    assert numbers["answers"] > 0
    assert not torch.equal(trainer.parameters[-1], before)
    failures += [RuntimeError("something else"), torch.OutOfMemoryError("full")]
    for error in list(failures):
        with pytest.raises(type(error)):
            trainer.step(batch, 1.0, lines.append)


def test_a_gradient_that_is_no_number_changes_nothing(folder, tmp_path, encoder, monkeypatch):
    trainer = training.Trainer(options(folder, tmp_path), torch.device("cpu"))
    batch = feeding.Batch(0, 1024, *documents.make_batch(encoder, 0, 0, 1024, 1024))
    before = [parameter.clone() for parameter in trainer.parameters]

    def broken(batch):
        for parameter in trainer.parameters:
            parameter.grad = torch.full_like(parameter, torch.nan)
        return dict(answers=torch.nan, text=0.0)

    monkeypatch.setattr(trainer, "gradients", broken)
    trainer.step(batch, 1.0, print)
    assert trainer.skipped == 1
    assert all(map(torch.equal, trainer.parameters, before))


def test_adapters_change_nothing_at_first_and_merge_to_the_trained_model(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    forward.register_attention()
    model = low_rank.load_base(folder, 5e5, 4096, dtype=torch.bfloat16)
    plain = low_rank.load_base(folder, dtype=torch.bfloat16)
    layers = low_rank.attach(plain, 4, 2)
    ids = torch.randint(3, 1200, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, base(ids).logits)
    layers = low_rank.attach(model, 4, 2)
    assert len(layers) == 14
    generator = torch.Generator().manual_seed(2)
    for layer in layers.values():
        layer.up.data = torch.randn(layer.up.shape, generator=generator).mul(0.3).bfloat16().float()
        layer.down.data = layer.down.data.bfloat16().float()
    low_rank.save_adapter(tmp_path / "a.safetensors", layers, dict(rope_theta="500000.0", max_position_embeddings="4096", fraction="1"))
    low_rank.merge(folder, tmp_path / "a.safetensors", str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert merged.config.rope_parameters["rope_theta"] == 5e5
    assert merged.config.max_position_embeddings == 4096
    with torch.no_grad():
        trained = model(ids).logits
        assert torch.equal(trained, merged(ids).logits)
        assert (trained - base(ids).logits).abs().max() > 0.1
    fresh = low_rank.attach(low_rank.load_base(folder, dtype=torch.bfloat16), 4, 2, seed=1)
    low_rank.load_into(fresh, low_rank.read_adapter(tmp_path / "a.safetensors")[0])
    assert all(torch.equal(fresh[name].merged(), layer.merged()) for name, layer in layers.items())


def test_an_adapter_that_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(KvskimError, match="no adapter at"):
        low_rank.read_adapter(tmp_path / "none.safetensors")
    layers = low_rank.attach(low_rank.load_base(folder, dtype=torch.bfloat16), 4, 2)
    low_rank.save_adapter(tmp_path / "a.safetensors", layers, {})
    with pytest.raises(KvskimError, match="rope_theta"):
        low_rank.read_adapter(tmp_path / "a.safetensors")
    other = low_rank.attach(low_rank.load_base(folder, dtype=torch.bfloat16), 3, 2)
    with pytest.raises(KvskimError, match="does not fit"):
        low_rank.load_into(other, {f"{n}.{part}": getattr(layer, part) for n, layer in layers.items() for part in ("up", "down")})
    with pytest.raises(KvskimError, match="below 16 MiB"):
        low_rank.attach(low_rank.load_base(folder, dtype=torch.bfloat16), 10000, 2)


def test_the_shipped_adapter_fits_the_model_and_the_defaults_of_the_recipe(folder, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(FOLDER) / "adapter.safetensors"
    tensors, metadata = low_rank.read_adapter(path)
    recipe = training.parse(["--model", folder, "--output", str(tmp_path)])
    assert metadata == dict(base="SmolLM2-135M-Instruct", rope_theta=str(recipe.theta), max_position_embeddings=str(recipe.longest), fraction="1.0000")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # Raises where names or shapes differ.
    low_rank.load_into(low_rank.attach(model, recipe.rank, recipe.mlp_rank), tensors)
    assert path.stat().st_size < low_rank.LARGEST_ADAPTER
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() and tensor.any() for tensor in tensors.values())


def test_fused_norms_are_the_norms_of_the_model(folder):
    model = low_rank.load_base(folder, dtype=torch.float32)
    ids = torch.randint(3, 1200, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(ids).logits
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.variance_epsilon = 0.5
        changed = model(ids).logits
        forward.fuse_norms(model)
        torch.testing.assert_close(model(ids).logits, changed, rtol=1e-4, atol=1e-4)
    assert (before - changed).abs().max() > 0.01


def test_the_attention_of_the_training_is_that_of_transformers(folder):
    forward.register_attention()
    ids = torch.randint(3, 1200, (2, 40), generator=torch.Generator().manual_seed(1))
    results = []
    for name in ("eager", forward.ATTENTION_NAME):
        model = low_rank.load_base(folder, dtype=torch.float32, attn_implementation=name)
        with torch.no_grad():
            results.append(model(ids).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_training_lowers_the_loss_and_leaves_adapters_and_a_log(folder, tmp_path, capsys):
    result = training.train(options(folder, tmp_path / "a", "--steps", "16"))
    losses = [row["text"] + row["answers"] for row in result["losses"]]
    assert result["steps"] == len(losses) == 16
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"adapter.safetensors", "half.safetensors", "log.json"}
    assert json.loads((tmp_path / "a" / "log.json").read_text())["steps"] == 16
    assert [row["fraction"] for row in result["exact_match"]] == pytest.approx([0, 0.125, 0.25, 0.4375, 0.5625, 0.75, 0.875, 1], abs=0.07)
    assert "niah_multikey_3" in capsys.readouterr().out
    half, metadata = low_rank.read_adapter(tmp_path / "a" / "half.safetensors")
    whole, _ = low_rank.read_adapter(tmp_path / "a" / "adapter.safetensors")
    assert 0.5 <= float(metadata["fraction"]) < 0.6
    assert any(not torch.equal(half[name], whole[name]) for name in half)

    resumed = training.Trainer(options(folder, tmp_path / "b", "--resume", str(tmp_path / "a" / "half.safetensors")), torch.device("cpu"))
    assert resumed.begin == float(metadata["fraction"])
    assert all(torch.equal(resumed.layers[n.rpartition(".")[0]].up.data.bfloat16(), t) for n, t in half.items() if n.endswith("up"))
    with pytest.raises(KvskimError, match="give --start"):
        training.Trainer(options(folder, tmp_path / "b", "--resume", str(tmp_path / "a" / "adapter.safetensors")), torch.device("cpu"))


def test_training_ends_with_its_time_and_keeps_what_it_learnt_when_it_fails(folder, tmp_path, monkeypatch):
    class Ticking(training.Clock):
        """Every look at the clock is a second later."""

        def elapsed(self):
            self.now = getattr(self, "now", 0) + 1
            return float(self.now)

    monkeypatch.setattr(training, "Clock", Ticking)
    result = training.train(options(folder, tmp_path / "a", "--seconds", "60"))
    assert 1 < result["steps"] < 60
    assert result["seconds"] < 70
    assert (tmp_path / "a" / "half.safetensors").exists()

    def failing(self, batch, rate, log):
        raise ValueError("broken")

    monkeypatch.setattr(training.Trainer, "step", failing)
    with pytest.raises(ValueError, match="broken"):
        training.train(options(folder, tmp_path / "b", "--seconds", "60"))
    assert (tmp_path / "b" / "stopped.safetensors").exists()


@pytest.mark.parametrize(("begin", "elapsed", "left"), [(0.0, 57.0, True), (0.0, 59.0, False), (0.5, 7.0, True), (0.5, 9.0, False)])
def test_no_step_begins_that_would_leave_no_time_for_the_last_measure(folder, tmp_path, begin, elapsed, left):
    clock = training.Clock(100.0, 0, begin)
    clock.elapsed = lambda: elapsed
    progress = training.Progress(SimpleNamespace(options=options(folder, tmp_path, "--seconds", "100"), begin=begin), clock, print, [])
    progress.slowest, progress.measuring = 10.0, 20.0
    assert progress.time_left() is left


def test_the_rate_rises_stays_and_falls():
    rates = [training.rate_at(i / 100) for i in range(101)]
    assert rates[0] == 0.05
    assert rates[2:61] == [1.0] * 59
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[100] == pytest.approx(training.LAST_RATE)


def test_documents_become_longer_with_time():
    def mean(fraction, longest=32768):
        lengths = [feeding.length_at(fraction, random.Random(i), longest) for i in range(300)]
        assert max(lengths) <= longest
        return sum(lengths) / 300

    means = [mean(fraction) for fraction in (0.1, 0.3, 0.6, 0.9, 1.2)]
    assert means == sorted(means)
    assert means[0] < 3000 < 14000 < means[2]
    assert mean(0.9, 1024) == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seconds", "0"], "--seconds is 0"), (["--longest", "512"], "--longest is 512"), (["--model", "/nowhere"], "no model at /nowhere")],
)
def test_bad_options_are_one_sentence(folder, tmp_path, arguments, message):
    with pytest.raises(KvskimError, match=message):
        training.parse(["--model", folder, "--output", str(tmp_path), *arguments])
