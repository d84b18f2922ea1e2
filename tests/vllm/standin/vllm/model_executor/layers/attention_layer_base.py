from abc import ABC, abstractmethod


class AttentionLayerBase(ABC):
    @abstractmethod
    def get_attn_backend(self): ...

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config): ...
