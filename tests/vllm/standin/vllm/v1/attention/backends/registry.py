from enum import Enum


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "flash"
    FLASH_ATTN_MLA = "mla"
    CUSTOM = None


overrides: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    overrides[backend] = class_path
    return lambda cls: cls
