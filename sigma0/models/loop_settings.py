"""T and the stride as settings of loading."""

from transformers import PreTrainedConfig

from sigma0.models import FAMILIES


def set_loops(name: str, config: PreTrainedConfig, recurrence: int | None, stride: int | None) -> None:
    """Writes T and the stride into a config, before a model is made of it.

    Args:
        name: What the model is loaded as, for the message.
        config: Of the model.
        recurrence: Loops at full depth; None leaves the checkpoint's own.
        stride: Loops that a pass runs; likewise, and of Raven alone.

    Raises:
        ValueError: For a model without loops, another family's stride, or a number that it cannot have.
    """
    given = {"recurrence": recurrence, "stride": stride}
    given = {field: value for field, value in given.items() if value is not None}
    if not given:
        return
    for field, value in given.items():
        if not isinstance(value, int):
            raise ValueError(f"{field} must be a whole number, got {value!r}")
    asked = " and ".join(f"{field}={value}" for field, value in given.items())
    if stride is not None and config.model_type != "huginn_raven":
        raise ValueError(
            f"{asked} cannot be set for {name!r}: a pass of {config.model_type} models runs one loop; leave stride out"
        )
    if config.model_type not in FAMILIES:
        raise ValueError(f"{asked} cannot be set for {name!r}: {config.model_type} models have no loops")
    if config.model_type == "nanbeige":
        # from which T would be read when the model is loaded again
        config.loop_loss_weights = None
    if config.model_type != "huginn_raven":
        given = {"num_loops": recurrence}
    for field, value in given.items():
        setattr(config, field, value)
    config.validate_loops()
