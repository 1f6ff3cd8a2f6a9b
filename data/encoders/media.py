"""Images, video and audio in records are refused, since only text is trained on: ignoring them would train on text that
refers to media the model does not see."""

from errors import UserError

FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of a record
TEXT = "text"  # the only accepted type of a part of a message


def refuse_media(record: dict, location: str) -> None:
    """Raise UserError for a record with a media field."""
    for field in FIELDS:
        if record.get(field):
            raise UserError(
                f"{location}: the record has '{field}', and only text is trained on; remove the record, or the field "
                "if its text makes sense alone"
            )


def refuse_media_parts(content: object, where: str) -> None:
    """Raise UserError for message content in parts of which one is not text."""
    if not isinstance(content, list):
        return
    for part in content:
        kind = part.get("type", TEXT) if isinstance(part, dict) else TEXT
        if kind != TEXT:
            raise UserError(
                f"{where} has a part of type '{kind}', and only text is trained on; remove the record, or the part if "
                "its text makes sense alone"
            )
