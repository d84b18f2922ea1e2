from typing import NamedTuple


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    capability = DeviceCapability(9, 0)

    def is_cuda(self) -> bool:
        return self.capability is not None

    def is_pin_memory_available(self) -> bool:
        return True

    def get_device_capability(self, device_id: int = 0):
        return self.capability


current_platform = Platform()
