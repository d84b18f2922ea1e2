from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend


class FlashAttnMLABackend(FlashAttentionBackend):
    @staticmethod
    def get_name():
        return "FLASH_ATTN_MLA"
