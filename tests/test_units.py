import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import ConfigError
from patrickstar.units import GIB, KIB, MIB, TIB, format_bytes, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * MIB),
        ("6GiB", 6 * GIB),
        (" 6 GiB ", 6 * GIB),
        ("6gib", 6 * GIB),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 * TIB),
        ("3kb", 3000),
        ("100", 100),
        ("100B", 100),
        ("0.1GiB", GIB // 10),
        ("1.1KB", 1100),
        ("70%", 700),
        ("33.3%", 333),
        ("100%", 1000),
        (123, 123),
    ],
)
def test_a_size_is_read_in_any_form_people_write(text, nbytes):
    assert parse_size(text, name="host_memory", total_bytes=1000) == nbytes


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "expected an int in bytes"),
        ("GiB", "expected an int in bytes"),
        ("six GiB", "expected an int in bytes"),
        ("-6GiB", "expected an int in bytes"),
        ("1e9", "expected an int in bytes"),
        ("6GiB/s", "expected an int in bytes"),
        ("٦GiB", "expected an int in bytes"),
        (6.5, "expected an int in bytes"),
        (True, "expected an int in bytes"),
        (None, "expected an int in bytes"),
        ("6GIBB", "unknown unit 'GIBB'; did you mean \"GiB\"?"),
        ("6parsec", "unknown unit 'parsec'; expected"),
        ("6b", 'did you mean "B"?'),
        ("6Gb", "unknown unit 'Gb'; did you mean \"GB\"?"),
        ("101%", "more than the whole tier"),
        (0, "a budget is more than 0 bytes"),
        (-1, "a budget is more than 0 bytes"),
        ("0GiB", "a budget is more than 0 bytes"),
        ("0.1B", "a budget is more than 0 bytes"),
    ],
)
def test_anything_else_is_refused_with_the_argument_and_the_reason(bad, why):
    with pytest.raises(ConfigError) as refusal:
        parse_size(bad, name="host_memory", total_bytes=1000)
    assert str(refusal.value).startswith(f"host_memory={bad!r}: ")
    assert why in str(refusal.value)


@pytest.mark.parametrize(("text", "nbytes"), [("2GiB/s", 2 * GIB), ("1.5 GB/s", 1_500_000_000), (7, 7)])
def test_a_rate_is_a_size_a_second(text, nbytes):
    assert parse_rate(text, name="emulated_link") == nbytes


@pytest.mark.parametrize(
    ("value", "says"),
    [("8", '8 bytes; 8GiB? Give the unit, as in "8GiB"'), (" 8 ", "8 bytes; 8GiB?"), ("1536", "1536 bytes; 1536MiB?")],
)
def test_a_number_that_has_lost_its_unit_is_asked_about(value, says):
    with pytest.raises(ConfigError) as refusal:
        parse_size(value, name="host_memory", least_bare=4096)
    assert says in str(refusal.value)
    for meant in (4096, "4096", "8B", "1KiB", "70%"):
        parse_size(meant, name="host_memory", total_bytes=100, least_bare=4096)


def test_a_share_needs_a_total():
    with pytest.raises(ConfigError, match="the total of this tier is not known here"):
        parse_size("70%", name="disk_memory")


def test_a_size_of_four_hundred_digits_is_read_exactly():
    assert parse_size("9" * 400 + "B", name="disk_memory") == 10**400 - 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (-3 * MIB, "-3.00 MiB"),
        (int(13.25 * GIB), "13.25 GiB"),
        (5 * TIB, "5.00 TiB"),
        (MIB - 1, "1.00 MiB"),
        (9999 * TIB, "9999.00 TiB"),
    ],
)
def test_bytes_print_with_two_decimals_and_a_binary_unit(nbytes, text):
    assert format_bytes(nbytes) == text


@settings(deadline=None)
@given(st.integers(1, 1 << 50))
def test_what_prints_parses_back_to_within_a_rounding(nbytes):
    assert parse_size(format_bytes(nbytes), name="x") == pytest.approx(nbytes, rel=0.006)
