"""Uploads the model of a finished run to the Hugging Face hub, with a model card that says how it was made.

    HF_TOKEN=... python -m extensions.hub outputs/demo --repo_id me/my-model
    python -m extensions.hub outputs/demo --repo_id me/my-model --folder outputs/demo/hf-step500 --public

The token is HF_TOKEN, or that of `hf auth login`. A new repository is private. Run it again after an upload that broke
off: what is there already is skipped. `--card_only` writes README.md and loss.png into the folder, and uploads nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from errors import UserError
from extensions.hub.model_card import README, find_base, find_license, write_card
from extensions.hub.upload import Repository, describe_error
from models.storage.steps import has_latest
from training.checkpoint.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m extensions.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_dir", type=Path, help="of the run")
    parser.add_argument("--repo_id", required=True, help="org/name, or your own name and that of the model")
    parser.add_argument("--folder", type=Path, help="an export of the run; default: its hf/")
    parser.add_argument("--public", action="store_true", help="a new repository can be read by all")
    parser.add_argument("--card_only", action="store_true", help="write the model card, and upload nothing")
    arguments = parser.parse_args()
    run = RunFolder(arguments.output_dir)
    folder = arguments.folder or run.export
    try:
        if not folder.is_dir():
            raise UserError(f"{folder} is not there; {find_remedy(run)}")
        if arguments.card_only:
            write_card(run, folder, arguments.repo_id, find_license(Path(find_base(run) or folder)))
            print(folder / README)
            return
        place = Repository(arguments.repo_id, private=not arguments.public).upload(run, folder, f"Upload {folder.name}")
    except UserError as error:
        sys.exit(f"error: {error}")
    except Exception as error:  # of huggingface_hub, its HTTP library, the network
        sys.exit(f"error: {folder} could not be uploaded ({describe_error(error)}); run the same command again")
    print(f"{folder} is at {place}")


def find_remedy(run: RunFolder) -> str:
    """Return what to do where the folder that would be uploaded does not exist."""
    exports = sorted(str(folder) for folder in run.path.glob(f"{run.export.name}*") if folder.is_dir())
    if exports:
        return f"give --folder, of {', '.join(exports)}"
    if has_latest(run.checkpoints):
        export = f"python convert2ckpt.py --to_hf --model_name_or_path {run.checkpoints} --output_dir {run.export}"
        return f"a run exports when it ends: continue it with resume=auto, or export its newest checkpoint: {export}"
    return "give the output_dir of a run that has finished"


if __name__ == "__main__":
    main()
