"""The names of the classes in the label of a record."""

from data.options import ProblemType
from errors import UserError


def name_classes(value: object, problem_type: ProblemType, where: str) -> list[str]:
    """Return the names of a record's classes. Raises `UserError` naming `where` for what names none."""
    if problem_type is ProblemType.multi_label_classification:
        if not isinstance(value, list):
            raise UserError(
                f"{where} must be a list of labels (data.problem_type={problem_type.value}), not {value!r}; fix or "
                "remove the record"
            )
        return [_name_class(each, where) for each in value]
    return [_name_class(value, where)]


def _name_class(value: object, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} must be a label, a text or a whole number, not {value!r}; fix or remove the record")
    return value
