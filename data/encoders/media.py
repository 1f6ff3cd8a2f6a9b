"""Images, video and sound in records: they are refused, since only text is trained on. Without them the text that asks
about them would be trained on as it stands."""

from errors import UserError

FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of a record, beside its text
TEXT = "text"  # the one type of a part of a message that is none


def refuse_media(record: dict, location: str) -> None:
    """Raises UserError for a record that has any, in a field of its own."""
    for field in FIELDS:
        if record.get(field):
            raise UserError(
                f"{location}: the record has '{field}', and only text is trained on; remove the record, or the field "
                "if its text makes sense alone"
            )


def refuse_media_parts(content: object, where: str) -> None:
    """Raises UserError for the content of a message in parts, where one of them is not text."""
    if not isinstance(content, list):
        return
    for part in content:
        kind = part.get("type", TEXT) if isinstance(part, dict) else TEXT
        if kind != TEXT:
            raise UserError(
                f"{where} has a part of type '{kind}', and only text is trained on; remove the record, or the part if "
                "its text makes sense alone"
            )
