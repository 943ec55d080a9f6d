"""`outbox-relay`: the service, and what an operator does with events that were set aside.

    outbox-relay --sink https://example.org/events
    outbox-relay shop.jobs:app --sink queue:
    outbox-relay status | parked | retry ID .. | skip ID .. | hold AGGREGATE | replay --type ..

Each module of this package is one command, found by its name, as in `pgqueue.cli`; `_service` is what runs
when the first word is no command.
"""

from __future__ import annotations

import click

from pgqueue.cli import Commands

RUN = "run"


class RelayCommands(Commands):
    """A group that starts the service unless a command is named."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _run() if cmd_name == RUN else super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = {*self.list_commands(ctx), "-h", "--help", "--version"}
        return super().parse_args(ctx, args if args and args[0] in named else [RUN, *args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        service = _run()
        with formatter.section("Options of the service"):
            formatter.write_dl([row for param in service.params if (row := param.get_help_record(ctx))])
        super().format_options(ctx, formatter)


@click.group(
    cls=RelayCommands,
    package=__name__,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    options_metavar="[APP] [OPTIONS]",
    subcommand_metavar="| COMMAND",
)
@click.version_option(package_name="pgqueue-relay", prog_name="outbox-relay")
def main() -> None:
    """Publish the events of the outbox to a sink, in order per aggregate, at least once.

    APP (module:name) is needed only by the sink queue:, whose subscribers it holds.
    """


def _run() -> click.Command:
    from relay.cli._service import command

    return command
