import click
import pytest

from patrickstar.cli.flags import Invocation, VariadicCommand, debug_option


def parse(arguments):
    @click.command(cls=VariadicCommand)
    @click.option("--data", multiple=True)
    @click.option("--steps", type=int)
    @click.option("--resume", is_flag=True)
    def verb(**given):
        return given

    return verb.main(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (["--data", "a"], ("a",)),
        (["--data", "a", "b", "c"], ("a", "b", "c")),
        (["--data", "a", "b", "--steps", "3", "--data", "c"], ("a", "b", "c")),
        (["--resume", "--data", "a", "b", "--resume"], ("a", "b")),
        (["--data=a", "--steps", "3"], ("a",)),
        (["--data", "-", "b"], ("-", "b")),
        (["--steps", "3"], ()),
    ],
)
def test_data_takes_all_words_up_to_the_next_option(arguments, data):
    assert parse(arguments)["data"] == data


@pytest.mark.parametrize("arguments", [["a"], ["--steps", "3", "a"], ["--data", "a", "--steps", "3", "b"], ["--data"]])
def test_a_word_that_belongs_to_no_option_is_refused(arguments):
    with pytest.raises(click.UsageError):
        parse(arguments)


def test_debug_is_heard_wherever_it_stands():
    @click.group()
    @debug_option
    def cli():
        pass

    @cli.command()
    @debug_option
    def verb():
        pass

    for arguments in (["--debug", "verb"], ["verb", "--debug"]):
        invocation = Invocation()
        cli.main(arguments, standalone_mode=False, obj=invocation)
        assert invocation.debug, arguments
