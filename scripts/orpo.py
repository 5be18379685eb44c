"""ORPO with TRL's trainer, for `accelerate launch`: TRL ships such a script for SFT and DPO, but none for ORPO.

    accelerate launch --num_processes 4 scripts/orpo.py --model_name_or_path M --dataset_name FOLDER --output_dir OUT

Options are those of `trl.experimental.orpo.ORPOConfig`, `trl.ModelConfig` and `trl.ScriptArguments`. It uses nothing
of this project.
"""

from __future__ import annotations


def main() -> None:
    """Command line of the script."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    parser = TrlParser((ScriptArguments, ORPOConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config(fail_with_unknown_args=True)
    data = load_dataset(script.dataset_name, name=script.dataset_config)
    trainer = ORPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            attn_implementation=model.attn_implementation,
            dtype=model.dtype or "float32",
        ),
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split] if training.eval_strategy != "no" else None,
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
