"""Text from a trained model: the Hugging Face folder that a run exports.

    python scripts/generate.py --model_name_or_path outputs/demo/hf --prompt "What does json.loads do?"
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", required=True, nargs="+", help="one or more prompts")
    parser.add_argument("--prompt_template", default="{prompt}\n", help="as in training (data.prompt_template)")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, dtype="auto").eval()
    if torch.cuda.is_available():
        model = model.cuda()
    sampling = {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature > 0 else {"do_sample": False}
    for prompt in arguments.prompt:
        inputs = tokenizer(arguments.prompt_template.replace("{prompt}", prompt), return_tensors="pt").to(model.device)
        output = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=arguments.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id, **sampling,
        )  # fmt: skip
        print(f"> {prompt}\n{tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip()}\n")


if __name__ == "__main__":
    main()
