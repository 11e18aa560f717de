"""What autograd really keeps for the backward pass."""

import torch


class Kept:
    """What autograd keeps between forward and backward: bytes of its storages, parameters left out."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its address taken
        return tensor

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *args):
        self.hooks.__exit__(*args)

    def bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.storages.values())


def kept_by_one_layer(model, tokens: int, autocast: bool, mask: torch.Tensor | None = None) -> int:
    """Bytes that the first decoder layer keeps, without what all layers share, such as a `mask` of booleans."""
    decoder = model.get_model()
    hidden = torch.randn(1, tokens, decoder.config.hidden_size, requires_grad=True)
    positions = torch.arange(tokens)[None]
    kind = decoder.config.layer_types[:1] if isinstance(decoder.rotary_emb.rope_type, dict) else []
    embeddings = decoder.rotary_emb(hidden, positions, *kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with Kept(model) as kept:
            decoder.layers[0](hidden, position_embeddings=embeddings, attention_mask=mask)
    tables = sum(x.untyped_storage().nbytes() for x in embeddings)
    copies = 2 * sum(p.numel() for p in decoder.layers[0].parameters() if p.ndim == 2) if autocast else 0
    return kept.bytes() - tables - copies
