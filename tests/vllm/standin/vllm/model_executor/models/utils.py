def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    assert len(numbers) == 1, layer_name
    return numbers[0]
