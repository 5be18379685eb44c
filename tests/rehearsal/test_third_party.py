"""Code of others, unchanged: what is known to be good has no finding and the CPU's losses; what is broken is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import NAMES, build, train

from auto_research.rehearsal import rehearse


def clean(report) -> bool:
    """No finding; the texts show in a failure."""
    assert [f.text() for f in report.findings] == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_architectures(name):
    expected = train(name, "cpu")
    with rehearse(keep_going=True) as report:
        assert train(name, "cuda") == expected
    assert clean(report)
    with rehearse(keep_going=True) as report:
        train(name, "cuda", autocast=torch.bfloat16)
    assert clean(report)


def test_the_zoo_is_large_enough():
    assert len(NAMES) >= 20


@pytest.mark.parametrize("masked", [False, True])
def test_transformer_of_torch(masked):
    def run(device):
        torch.manual_seed(0)
        model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).to(device)
        x = torch.linspace(-1, 1, 160).view(2, 5, 16).to(device)
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=device) if masked else None
        loss = model(x, x, tgt_mask=mask).square().mean()
        loss.backward()
        return loss.item()

    expected = run("cpu")
    with rehearse(keep_going=True) as report:
        assert run("cuda") == expected
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).cuda().eval()
        with torch.no_grad():
            padding = torch.tensor([[False, False, True], [False, True, True]], device="cuda")
            encoder(torch.ones(2, 3, 16, device="cuda"), src_key_padding_mask=padding)
        with torch.inference_mode():
            encoder(torch.ones(2, 3, 16, device="cuda"))
    assert clean(report)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_of_torch(kind):
    def run(device):
        torch.manual_seed(0)
        layer = getattr(nn, kind)(4, 3, num_layers=2, bidirectional=True, batch_first=True).to(device)
        out, _ = layer(torch.linspace(0, 1, 40).view(2, 5, 4).to(device))
        out.square().sum().backward()
        return [p.grad.cpu() for p in layer.parameters()]

    expected = run("cpu")
    with rehearse(keep_going=True) as report:
        for got, want in zip(run("cuda"), expected, strict=True):
            assert torch.equal(got, want)
    assert clean(report)


@pytest.mark.slow
def test_generate():
    with rehearse(keep_going=True) as report:
        model = build("Llama").to("cuda")
        ids = torch.tensor([[1, 5, 6]], device="cuda")
        on_card = model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
        model.generate(ids, max_new_tokens=4, do_sample=True, top_k=5, top_p=0.9)
        model.generate(ids, max_new_tokens=4, num_beams=3)
        build("T5").to("cuda").generate(ids, max_new_tokens=4)
    assert clean(report)
    assert on_card == build("Llama").generate(torch.tensor([[1, 5, 6]]), max_new_tokens=6, do_sample=False).tolist()


def _collate(rows):
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_trainer(tmp_path, precision):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": [1, 5, 6, 7], "labels": [1, 5, 6, 7]} for _ in range(8)]

    def make(steps):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            report_to=[],
            save_steps=2,
            logging_steps=1,
            disable_tqdm=True,
            **precision,
        )
        return Trainer(build("GPT2"), arguments, train_dataset=data, eval_dataset=data, data_collator=_collate)

    with rehearse(keep_going=True) as report:
        trainer = make(2)
        trainer.train()
        assert trainer.model.device.type == "cuda"
        assert trainer.evaluate()["eval_loss"] > 0
        make(3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert clean(report)


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_supervised_fine_tuning(tmp_path, adapter):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    extra = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")} if adapter else {}
    with rehearse(keep_going=True) as report:
        arguments = SFTConfig(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            bf16=True,
            max_length=16,
            disable_tqdm=True,
        )
        texts = Dataset.from_dict({"text": ["abc", "bcd", "cde", "xyz"]})
        trainer = SFTTrainer(
            build("Llama"), args=arguments, train_dataset=texts, processing_class=_tokenizer(), **extra
        )
        trainer.train()
    assert clean(report)


@pytest.mark.slow
def test_direct_preference_optimisation(tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = Dataset.from_dict({"prompt": ["ab", "bc"], "chosen": ["cd", "de"], "rejected": ["xy", "yz"]})
    with rehearse(keep_going=True) as report:
        arguments = DPOConfig(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            bf16=False,
            max_length=16,
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            build("Llama"), build("Llama"), args=arguments, train_dataset=pairs, processing_class=_tokenizer()
        )
        trainer.train()
    assert clean(report)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate(precision):
    """A training loop of accelerate: prepare, backward, clipping, gather, unwrapping."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def run(cpu):
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=cpu, mixed_precision="no" if cpu else precision)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(16, 6), torch.linspace(0, 1, 16)[:, None])
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=4)
        )
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        device = next(accelerator.unwrap_model(model).parameters()).device.type
        AcceleratorState._reset_state(True)
        return device, losses

    _, expected = run(cpu=True)
    with rehearse(keep_going=True) as report:
        device, losses = run(cpu=False)
    assert clean(report)
    assert device == "cuda"
    if precision == "no":
        assert losses == expected


@pytest.mark.slow
def test_sasrec_of_torch_rechub_has_three_faults():
    pytest.importorskip("torch_rechub", reason="the broken model lives in torch-rechub")
    from torch_rechub.basic.features import SequenceFeature
    from torch_rechub.models.matching import SASRec

    with rehearse(keep_going=True) as report:
        features = [
            SequenceFeature(
                name, vocab_size=30, embed_dim=8, pooling="concat", shared_with=None if name == "seq" else "seq"
            )
            for name in ("seq", "pos", "neg")
        ]
        model = SASRec(features, max_len=6).to("cuda")
        batch = {name: torch.randint(1, 30, (4, 6)).to("cuda") for name in ("seq", "pos", "neg")}
        positive, negative = model(batch)
        (positive.sum() - negative.sum()).backward()
    assert [f.rule for f in report.findings] == ["DEV-1", "DEV-7", "DEV-1"]
    assert all("sasrec.py:" in f.site.via for f in report.findings)
    assert all(f.file == __file__ for f in report.findings)
