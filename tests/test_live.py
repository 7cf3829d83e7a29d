"""The live line: what it says, and where a notebook shows it while a cell runs and afterwards."""

from __future__ import annotations

import os
import re

import pytest

from ipygpumem.model import Reading
from ipygpumem.reports.live import LivePoint, live_html, live_text, sample_of
from ipygpumem.units import GIB, MIB
from tests.kernel import Kernel, Reply
from tests.steps import kernel_with

# -- what it says ----------------------------------------------------------------------------------------------------

HOST = Reading("cpu", 512 * MIB, 0, "kernel", 64 * GIB)
GPU = Reading("cuda:0", 2 * GIB, 0, "allocator", 80 * GIB, reserved_bytes=3 * GIB, used_bytes=5 * GIB)


def samples(*sizes: int, device: str = "cpu", every: float = 0.5) -> list[LivePoint]:
    return [LivePoint(1 + index * every, {device: size}) for index, size in enumerate(sizes)]


def test_the_line_has_the_time_and_each_device_of_its_total() -> None:
    now = [sample_of(12.7, [HOST, GPU])]
    assert live_text([HOST, GPU], now, width=200) == "12 s · RAM 512 MiB / 64.00 GiB ▁ · cuda:0 5.00/80.00 GiB ▁"


def test_a_device_without_driver_counts_what_this_process_has_reserved() -> None:
    alone = GPU._replace(used_bytes=None)
    assert "cuda:0 3.00/80.00 GiB" in live_text([alone], [sample_of(1, [alone])], width=200)


def test_devices_that_hold_nothing_and_totals_that_nobody_knows_are_left_out() -> None:
    idle = Reading("cuda:1", 0, 0, "allocator", 80 * GIB, reserved_bytes=0)
    strange = Reading("mps", 3 * MIB, 0, "sampled")
    assert live_text([idle, strange], [sample_of(1, [idle, strange])], width=200) == "1 s · mps 3 MiB ▁"


def test_children_are_said_beside_the_process() -> None:
    parent = HOST._replace(children_bytes=3 * GIB)
    assert "64.00 GiB, children 3.00 GiB" in live_text([parent], [sample_of(1, [parent])], width=200)


def test_long_times_are_minutes() -> None:
    assert live_text([], [LivePoint(125.9, {})], width=200) == "2 min 5 s"


def test_the_curve_is_the_highest_of_each_piece_of_the_last_minute() -> None:
    sizes = [GIB] * 100 + [60 * GIB] + [GIB] * 19
    line = live_text([HOST], samples(*sizes), width=200)
    assert line.endswith("▁" * 16 + "█" + "▁" * 3)
    assert len(line.rpartition(" ")[2]) == 20


def test_a_curve_that_hardly_moves_is_flat() -> None:
    assert live_text([HOST], samples(*[512 * MIB, 513 * MIB] * 20), width=200).endswith(" ▁▁▁▁▁▁▁")


def test_a_narrow_terminal_gets_shorter_curves_then_none_then_less_words() -> None:
    long = samples(*[512 * MIB] * 120)
    lengths = [len(live_text([HOST], long, width=width)) for width in (100, 50, 33, 10)]
    assert lengths == [56, 46, 33, 10]
    assert live_text([HOST], long, width=10) == "1 min 0 s "
    assert live_text([HOST], long, width=10, ascii_only=True).isascii()
    assert live_text([HOST], long, width=100, ascii_only=True).isascii()


def test_the_html_escapes_what_a_device_is_called() -> None:
    strange = Reading("<b>", 3 * MIB, 0, "sampled", GIB)
    assert "<b>" not in live_html([strange], [sample_of(1, [strange])])


# -- where it is shown -----------------------------------------------------------------------------------------------


LOAD = "import time, sys, threading\nfrom tests.waiting import tick_often, ticks\ntick_often()\n%load_ext ipygpumem"
notebook = kernel_with(LOAD)


def live_lines(reply: Reply) -> list[str]:
    """Return the live lines that came as updates, as text."""
    found = [item for item in reply.updates if item["metadata"].get("ipygpumem") == {"reports": ["live"]}]
    return [re.sub("<[^>]*>", "", item["data"]["text/html"]) for item in found]


def test_a_long_cells_line_is_updated_and_then_replaced_by_its_report(notebook: Kernel) -> None:
    reply = notebook.run("ticks(4)", browser=True)
    lines = live_lines(reply)
    assert len(lines) >= 2
    assert re.fullmatch(r"\d+ s · RAM [\d.]+ MiB / [\d.]+ [GT]iB", lines[-1])
    (display,) = reply.displays
    assert display["metadata"] == {"ipygpumem": {"reports": ["cell"]}}
    assert display["data"]["text/plain"].startswith("cell ")


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("print('hello')", ["stdout"]),
        ("sys.stderr.write('hello')", ["stderr", "result"]),
        ("display('shown'); 7 * 6", ["display", "result"]),
        ("1 / 0", ["error"]),
        ("!echo child", ["stdout"]),
        ("talker = threading.Thread(target=print, args=['hello']); talker.start(); talker.join()", ["stdout"]),
        ("child = fork.Process(target=print, args=['hello']); child.start(); child.join(); ticks(2)", ["stdout"]),
        ("clear_output(); print('hello')", ["stdout"]),
        ("from comm import create_comm; create_comm(target_name='nobody').close(); ticks(2)", []),
    ],
)
def test_before_the_cells_first_output_the_line_is_gone_and_it_does_not_come_back(
    notebook: Kernel, code: str, kinds: list[str]
) -> None:
    notebook.run(
        "import os, multiprocessing, warnings; from IPython.display import clear_output\n"
        "warnings.simplefilter('ignore'); fork = multiprocessing.get_context('fork')"
    )
    reply = notebook.run(f"ticks(3)\n{code}", browser=True)
    assert live_lines(reply)
    assert reply.kinds == [*kinds, "display"]
    *users, report = reply.displays
    assert report["data"]["text/plain"].startswith("cell ")
    assert len(users) == kinds.count("display")
    reply = notebook.run(f"{code.replace('clear_output(); ', '')}\nticks(3)", browser=True)
    assert live_lines(reply) == []


def test_what_c_code_and_child_processes_write_is_the_cells_output_too() -> None:
    # The kernel looks at the descriptors themselves, unless pytest runs it.
    kernel = Kernel(env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"})
    kernel.run(f"{LOAD}\nimport os")
    for code in ("os.write(1, b'from C')", "os.system('echo child')"):
        reply = kernel.run(f"ticks(3); _ = {code}; ticks(2)", browser=True)
        assert live_lines(reply)
        assert reply.kinds == ["stdout", "display"]
    kernel.close()


@pytest.mark.parametrize("text", ["40%|####", "\\r 40%", "step 6\\n", ". . .", "\\x1b[2K"])
def test_after_output_no_line_opens_and_the_text_stays_whole(notebook: Kernel, text: str) -> None:
    reply = notebook.run(f"print('{text}', end=''); ticks(3); print('{text}')", browser=True)
    assert (reply.updates, reply.kinds) == ([], ["stdout", "display"])


def test_text_that_waits_to_be_sent_counts_as_shown(notebook: Kernel) -> None:
    notebook.run("sys.stdout.flush_interval, usual = 30, sys.stdout.flush_interval")
    reply = notebook.run("print('waits', end=''); ticks(3); print(' no more')", browser=True)
    notebook.run("sys.stdout.flush_interval = usual")
    assert (reply.updates, reply.kinds) == ([], ["stdout", "display"])


def test_a_display_of_an_earlier_cell_that_is_updated_does_not_take_the_line_away(notebook: Kernel) -> None:
    notebook.run("from IPython.display import display\nhandle = display('old', display_id='earlier')")
    reply = notebook.run("ticks(2); handle.update('new'); ticks(5)", browser=True)
    assert len(live_lines(reply)) >= 4
    assert (reply.kinds, reply.order) == (["display"], ["report"])


def test_consoles_that_ignore_updates_get_no_line(notebook: Kernel) -> None:
    reply = notebook.run("ticks(2)")
    assert [list(item["data"]) for item in reply.displays] == [["text/plain", "text/html"]]


def test_a_question_to_the_user_takes_the_line_away(notebook: Kernel) -> None:
    asked = "from unittest import mock\nkernel = get_ipython().kernel\n"
    asked += "with mock.patch.object(kernel.session, 'recv', lambda *a: (0, {'content': {'value': 'yes'}})), "
    asked += "mock.patch('zmq.select', lambda *a: ([1], [], [])):\n    answer = input('well? ')\nticks(2)"
    reply = notebook.run(f"ticks(2)\n{asked}", browser=True)
    assert live_lines(reply)
    assert notebook.value("answer") == "yes"
    assert reply.order == ["report", "report"], "the report took the place of the line, above the question"
    assert reply.kinds == ["display"]


def test_an_error_and_an_interrupt_leave_no_line(notebook: Kernel) -> None:
    stopped = notebook.run("time.sleep(600)", interrupt_when=live_lines, browser=True)
    assert (stopped.error, stopped.kinds) == ("KeyboardInterrupt", ["error", "display"])
    assert "live" not in str(stopped.displays[0]["metadata"])


def test_where_no_report_comes_the_line_leaves_nothing(notebook: Kernel) -> None:
    notebook.run("%config IPyGpuMem.min_cell_seconds = 600")
    reply = notebook.run("ticks(3)", browser=True)
    notebook.run("%config IPyGpuMem.min_cell_seconds = 0")
    assert live_lines(reply)
    assert (reply.kinds, reply.displays) == ([], [])


def test_an_experiments_report_takes_the_lines_place(notebook: Kernel) -> None:
    reply = notebook.run("%%experiment slow\nticks(2)", browser=True)
    (display,) = reply.displays
    assert display["metadata"]["ipygpumem"]["reports"] == ["cell", "experiment"]


@pytest.mark.parametrize(
    ("setting", "back"),
    [
        ("%config IPyGpuMem.live = False", "%config IPyGpuMem.live = True"),
        ("%gpumem off", "%gpumem on"),
    ],
)
def test_it_can_be_switched_off_and_on_again(notebook: Kernel, setting: str, back: str) -> None:
    notebook.run(setting)
    off = notebook.run("ticks(3)", browser=True)
    notebook.run(back)
    on = notebook.run("ticks(4)", browser=True)
    assert (off.updates, len(off.displays) <= 1) == ([], True)
    assert on.updates


def test_captured_output_stays_as_the_user_made_it(notebook: Kernel) -> None:
    reply = notebook.run("%%capture box\nticks(3); print('inside'); display('shown')", browser=True)
    assert reply.updates == []
    assert notebook.value("(box.stdout, len(box.outputs))") == ("inside\n", 1)
    reply = notebook.run("import io\nreal, sys.stdout = sys.stdout, io.StringIO()\nticks(3)\nsys.stdout = real")
    assert reply.updates == []


def test_a_client_that_cannot_be_asked_gets_no_line(notebook: Kernel) -> None:
    reply = notebook.run("ticks(3)", allow_stdin=False)
    assert (reply.updates, len(reply.displays)) == ([], 1)


def test_silent_code_gets_no_line(notebook: Kernel) -> None:
    reply = notebook.run("time.sleep(1.7)", silent=True)  # no cell, so no tick tells that it is long
    assert (reply.updates, reply.displays) == ([], [])


def test_a_cell_whose_threads_print_and_one_that_clears_its_output_end_with_the_report(notebook: Kernel) -> None:
    notebook.run(
        "def talk():\n    for i in range(20):\n        print(i, flush=True); time.sleep(0.02)\n"
        "talker = threading.Thread(target=talk)"
    )
    reply = notebook.run("talker.start(); talker.join()", browser=True)
    assert reply.stdout.split() == [str(i) for i in range(20)]
    assert reply.order[-1] == "report"
    reply = notebook.run("from IPython.display import clear_output\nticks(2); clear_output()", browser=True)
    assert (reply.kinds, len(reply.reports("cell"))) == (["display"], 1)


def test_in_a_cell_that_clears_its_output_in_a_loop_no_line_comes_between(notebook: Kernel) -> None:
    notebook.run("from IPython.display import clear_output")
    loop = "for i in range(5):\n    clear_output(wait=True); print(i); ticks(1)"
    reply = notebook.run(loop, browser=True)
    assert reply.updates == []
    assert [list(item["data"]) for item in reply.displays] == [["text/plain", "text/html"]]
    assert reply.order[-1] == "report"
    assert live_lines(notebook.run("ticks(4)", browser=True)), "the next cell has no line"


def test_a_nested_cell_keeps_the_line_of_the_outer_one(notebook: Kernel) -> None:
    reply = notebook.run("get_ipython().run_cell('ticks(2)'); ticks(3)", browser=True)
    assert len(reply.displays) == 1
    assert live_lines(reply)


def test_unloading_in_the_cell_itself_takes_the_line_and_the_thread_away(bare_kernel: Kernel) -> None:
    kernel = bare_kernel
    kernel.run(LOAD)
    reply = kernel.run("ticks(2)\n%unload_ext ipygpumem\ntime.sleep(0.2)", browser=True)
    assert (reply.kinds, reply.displays) == ([], [])
    assert kernel.value("[t.name for t in threading.enumerate() if 'ipygpumem' in t.name]") == []
    left = "[name for name in ('_really_send',) if name in vars(sys.stdout.pub_thread)]"
    kernel.run("import sys")
    assert kernel.value(left) == []
    assert kernel.value("'_input_request' in vars(get_ipython().kernel)") is False


def test_a_forked_child_of_a_long_cell_shows_nothing_and_both_end(notebook: Kernel) -> None:
    reply = notebook.run(
        "import os, warnings\nwarnings.simplefilter('ignore')\nticks(2)\n"
        "pid = os.fork()\nif pid == 0:\n    time.sleep(0.2); os._exit(3)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
        browser=True,
    )
    assert notebook.value("code") == 3
    assert len(reply.displays) == 1


# -- streams of the user's that pass on to the kernel's --------------------------------------------------------------

PASSES_ON = """
class PassesOn:
    def __init__(self, stream): self.stream, self.lock, self.text = stream, threading.RLock(), ''
    def __getattr__(self, name): return getattr(self.stream, name)
    def write(self, text): self.text += text; return len(text)
    def flush(self):
        with self.lock:
            self.stream.write(self.text); self.text = ''; self.stream.flush()
kernels = sys.stdout
"""


def test_a_stream_of_the_users_that_passes_on_is_not_flushed_in_the_kernels_thread(notebook: Kernel) -> None:
    notebook.run(f"{PASSES_ON}\nsys.stdout = PassesOn(kernels)")
    reply = notebook.run(
        "flushed = []\nPassesOn.flush = lambda self: flushed.append(threading.current_thread().name)\n"
        "ticks(4)\nsys.stdout = kernels",
        browser=True,
    )
    assert live_lines(reply)
    assert "IOPub" not in notebook.value("flushed")


def test_the_report_comes_after_the_text_that_a_stream_of_the_users_holds(notebook: Kernel) -> None:
    # A slow machine would have the live line come first, for good reason.
    notebook.run(f"%config IPyGpuMem.live = False\n{PASSES_ON}\nsys.stdout = PassesOn(kernels)")
    reply = notebook.run("print('held')", browser=True)
    notebook.run("%config IPyGpuMem.live = True\nsys.stdout = kernels")
    assert reply.order == ["held\n", "report"]


def test_the_report_comes_after_text_that_is_just_being_sent(notebook: Kernel) -> None:
    notebook.run(
        "buffers, flushes = sys.stdout._flush_buffers, threading.Event()\n"
        "def slowly():  # as very large text is made a message of\n"
        "    for item in buffers():\n        flushes.set(); time.sleep(1); yield item\n"
        "sys.stdout._flush_buffers = slowly"
    )
    reply = notebook.run("print('large'); _ = flushes.wait()", browser=True)
    notebook.run("del sys.stdout._flush_buffers")
    assert reply.order == ["large\n", "report"]


@pytest.mark.parametrize(
    ("code", "kinds"), [("1", ["result", "display"]), ("ticks(3)", ["display"]), ("1 / 0", ["error", "display"])]
)
def test_a_ctrl_c_while_the_report_is_on_its_way_is_said_in_it_and_leaves_no_live_line(
    notebook: Kernel, code: str, kinds: list[str]
) -> None:
    notebook.run(
        "import signal\nstruck = []\n"
        "def strike(message):\n"
        "    if not struck:\n        struck.append(True); signal.raise_signal(signal.SIGINT); sum(range(3))\n"
        "    return message"
    )
    reply = notebook.run(f"get_ipython().display_pub.register_hook(strike); {code}", browser=True)
    assert notebook.run("get_ipython().display_pub.unregister_hook(strike)").result == "True"
    assert (reply.status, reply.kinds) == ("error", kinds)
    assert reply.displays[-1]["data"]["text/plain"].startswith("cell ")
    assert "Error in callback" not in reply.stdout


def test_where_output_is_captured_for_good_our_own_work_at_a_cells_end_shows_nothing(kernel: Kernel) -> None:
    kernel.run(
        "%load_ext ipygpumem\nfrom IPython.core.displaypub import CapturingDisplayPublisher\n"
        "from ipygpumem.notebook import live\nfrom ipygpumem.notebook.notebook import current_notebook\n"
        "live._WORK_SECONDS, session, shell = 0.0, current_notebook(), get_ipython()\n"
        "give_back, show, publisher = session.session._give_back, session.session._show, shell.display_pub\n"
        "def works(*words):\n"
        "    with session.tools.live.work('our own') as progress:\n        progress(0.5)\n"
        "    return give_back(*words)\n"
        "def releases(*words):\n    shell.display_pub = publisher\n    show(*words)\n"
    )
    reply = kernel.run(
        "session.session._give_back, session.session._show = works, releases\n"
        "shell.display_pub = CapturingDisplayPublisher()",
        browser=True,
    )
    assert "is not affected" not in reply.stderr
    assert reply.reports("cell")
