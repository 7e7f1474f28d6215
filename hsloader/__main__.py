"""``python -m hsloader``: the hsloader command."""

from hsloader.cli.main import main

main()
