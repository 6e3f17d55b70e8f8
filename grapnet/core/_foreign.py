"""Parameters that another part of torch holds in a way that no edit can follow."""

from torch import nn


def unfit_parameters(module: nn.Module) -> str:
    """Returns why the Parameters of a module cannot be edited; empty when they can.

    Attributes and class names decide, so torch.distributed is not imported.
    """
    for name, parameter in module.named_parameters():
        kinds = {kind.__name__ for kind in type(parameter).__mro__}
        if "DTensor" in kinds or hasattr(parameter, "_fsdp_flattened"):
            return (
                f"{name} is sharded over processes (FSDP or DTensor), and an edit needs all of its"
                " coordinates in every process. Replicate the net (DistributedDataParallel, or"
                " FSDP's ignored_params) and shard the rest of the model"
            )
        if getattr(parameter, "_in_backward_optimizers", None):
            return (
                f"{name} is trained inside of the backward pass (_apply_optimizer_in_backward),"
                " whose hooks an edit drops. Step in a hook of"
                " Tensor.register_post_accumulate_grad_hook, which edits keep, or after the"
                " backward pass"
            )
    return ""
