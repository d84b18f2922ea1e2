class QuantizeMethodBase:
    def process_weights_after_loading(self, layer) -> None:
        return
