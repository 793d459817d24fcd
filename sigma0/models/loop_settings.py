"""T and the stride of a model that takes any number of loops, as settings of loading."""

from transformers import PreTrainedConfig

from sigma0.models.raven_config import RavenConfig


def set_loops(name: str, config: PreTrainedConfig, recurrence: int | None, stride: int | None) -> None:
    """Writes T and the stride into a config, before a model is made of it.

    Args:
        name: What the model is loaded as, for the message.
        config: Of the model.
        recurrence: Loops at full depth; None leaves the checkpoint's own.
        stride: Loops that a pass runs; likewise.

    Raises:
        ValueError: For a family whose T is fixed, or a number that it cannot have.
    """
    given = {"recurrence": recurrence, "stride": stride}
    given = {field: value for field, value in given.items() if value is not None}
    if not given:
        return
    asked = " and ".join(f"{field}={value}" for field, value in given.items())
    if not isinstance(config, RavenConfig):
        raise ValueError(
            f"{asked} cannot be set for {name!r}: {config.model_type} models were trained for one number of loops; "
            "leave it out, and stop earlier by an exit rule, such as mode='fixed'"
        )
    for field, value in given.items():
        setattr(config, field, value)
    config.validate_loops()
