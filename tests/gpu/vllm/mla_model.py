"""A small DeepSeek-V2 with random weights and the tokenizer of another model, for `equality.py` and `soak.py`; its layers have no experts.

Only a few tokens can come next: among them the likeliest leads clearly, where the likeliest two of a whole random vocabulary are nearly equal and any
rounding changes what is generated.

    python tests/gpu/vllm/mla_model.py --tokenizer /tmp/smollm2 --output /tmp/mla
    python tests/gpu/vllm/equality.py --model /tmp/mla --dtype float16
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config

SPREAD = 0.03
"""Standard deviation of the weights. Twice as much in the attention makes a chaotic model, which enlarges the rounding of bfloat16 to 13% of the hidden state;
with this it is 2%, and what is attended still decides (without the first half of a text, the hidden state is another one)."""
NEXT_TOKENS, HEAD_SCALE = 16, 4.0
"""Tokens whose logits are not zero, and how much larger those are than with weights like the others."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokenizer", required=True, help="folder of a model")
    arguments.add_argument("--output", required=True)
    arguments.add_argument("--heads", type=int, default=16)
    arguments.add_argument("--layers", type=int, default=4)
    a = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer, local_files_only=True)
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=2048, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.heads, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=a.layers, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=SPREAD)
    likely = torch.zeros(len(tokenizer), 1)
    likely[torch.randperm(len(tokenizer))[:NEXT_TOKENS]] = HEAD_SCALE
    with torch.no_grad():
        model.lm_head.weight *= likely
    # Weights that both 16-bit types hold exactly, but for the smallest.
    model.to(torch.bfloat16).to(torch.float16)
    model.save_pretrained(a.output)
    tokenizer.save_pretrained(a.output)


if __name__ == "__main__":
    main()
