"""Command that shows a configuration's memory and the distribution of its time."""

from tools.show_recipe import main


def show(capsys, line):
    code = main(line.split())
    return code, *capsys.readouterr()


def test_a_row_for_each_value(capsys):
    line = "--preset gpt-22b --world-size 64 --vary global-batch-size 64 640 --markdown"
    code, out, _ = show(capsys, line)
    layout, memory, time = (
        [row.split(" | ") for row in table.split("\n")[2:]] for table in out.strip().split("\n\n")
    )
    assert code == 0
    assert [row[6] for row in layout] == ["8", "80"]  # micro-batches of 8 replicas
    assert memory[0][0] == time[0][0] == "| --global-batch-size 64"
    few, many = ([float(cell.removesuffix(" %")) for cell in (row[1], row[5])] for row in time)
    assert few[0] < many[0] < 10 * few[0] and few[1] > 4 * many[1], (
        "more micro-batches, a smaller bubble"
    )


def test_a_vocabulary_that_the_tokenizer_has_is_assumed(capsys):
    code, out, _ = show(
        capsys, "--preset gpt-22b-frontier --world-size 128 --vocab-file v.json --merge-file m.txt"
    )
    assert code == 0 and "50257" in out
