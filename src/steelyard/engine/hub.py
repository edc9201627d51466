"""Ask the Hugging Face Hub once whether it has a model, before transformers asks for its files."""

from __future__ import annotations

from steelyard.errors import ModelError

_FILE = "config.json"  # every model has one
_SECONDS = 10.0


def check_hub_model(name: str) -> None:
    """Check that a model is on the Hub, unless it is in the cache or the Hub is switched off.

    Without this, transformers repeats each request to a Hub that cannot be reached, with warnings,
    for half a minute. Whatever else is wrong, such as a model that needs a licence, transformers
    explains itself.

    Raises:
        ModelError: the Hub has no such model, or cannot be reached.
    """
    import huggingface_hub as hub  # noqa: PLC0415 - takes a second
    from huggingface_hub import constants, errors  # noqa: PLC0415 - as above

    rule = f"base_model must be a folder or a model on the Hugging Face Hub, got {name!r}"
    try:
        cached = isinstance(hub.try_to_load_from_cache(name, _FILE), str)
        if not cached and not constants.HF_HUB_OFFLINE:
            hub.get_hf_file_metadata(hub.hf_hub_url(name, _FILE), timeout=_SECONDS)
    except errors.HfHubHTTPError as error:  # the Hub has answered
        is_gated = isinstance(error, errors.GatedRepoError)
        if isinstance(error, errors.RepositoryNotFoundError) and not is_gated:
            raise ModelError(
                f"{rule}, and the Hub has none of that name: correct it, or, if the model is "
                f"private, log in with 'hf auth login'."
            ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{rule}: {' '.join(str(error).split())}") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ModelError(
            f"{rule}, which is neither a folder nor in the cache, and the Hub cannot be reached: "
            f"{reason}."
        ) from error
