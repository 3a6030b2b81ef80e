import click
import pytest

from patrickstar.cli.flags import DEVICE, Invocation, Size, Spelling, VariadicCommand, debug_option


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


@pytest.mark.parametrize(
    ("kind", "text", "refused"),
    [
        *((DEVICE, word, None) for word in ("cpu", "emulated", "cuda", "cuda:0", "cuda:13")),
        *((DEVICE, word, "is none of cpu, emulated, cuda, cuda:N") for word in ("CPU", "cuda:", "cuda:x", "", "mps")),
        *((Size(), text, None) for text in ("1048576", "4096B", "512MiB", "1.5GB", "70%")),
        *((Size(), text, "size=") for text in ("", "much", "-1", "101%", "3 apples", "8", "4096")),
        (Spelling("constant", "cosine"), "constnt", r'constnt. is none of .*, cosine; did you mean "constant"'),
    ],
)
def test_words_are_taken_as_written_or_refused(kind, text, refused):
    if refused is None:
        assert kind.convert(text, None, None) == text
    else:
        with pytest.raises(click.UsageError, match=refused):
            kind.convert(text, None, None)


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
