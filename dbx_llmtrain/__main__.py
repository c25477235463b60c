"""``python -m dbx_llmtrain`` is the command ``dbx-llmtrain``."""

from dbx_llmtrain.cli import main

if __name__ == "__main__":
    main()
