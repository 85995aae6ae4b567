"""NAME=VALUE words of a command line."""

from paramserver_node.words import pairs


def test_arguments_keep_their_json_types() -> None:
    """The text after the first '=' is parsed as JSON, or kept as it is if it is not JSON."""
    assert pairs(["a=1", "b=true", "c=x=y", "d=[1, 2]", "e="]) == {"a": 1, "b": True, "c": "x=y", "d": [1, 2], "e": ""}
