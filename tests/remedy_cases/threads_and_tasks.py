"""Places that threads, timers, queues and tasks have."""

from tests.remedy_cases.case import Case

THREADS_AND_TASKS: dict[str, Case] = {
    "a context variable": Case(
        "var.set(x);", setup="import contextvars; var = contextvars.ContextVar('var')"
    ),
    "a context variable's dict": Case(
        'var.get()["a"] = x',
        setup="import contextvars; var = contextvars.ContextVar('var'); var.set({});",
    ),
    "a timer of an event loop": Case(
        "loop.call_later(600, print, x);",
        setup="import asyncio; loop = asyncio.new_event_loop()",
        after="assert all(timer.cancelled() for timer in loop._scheduled)",
    ),
    "a timer in a list": Case(
        "outer.append(loop.call_at(10**9, print, x))",
        setup="import asyncio; loop = asyncio.new_event_loop(); outer = []",
    ),
    "a timer's closure": Case(
        """
        def later(data):
            return lambda: data
        loop.call_later(600, later(x));
        """,
        setup="import asyncio; loop = asyncio.new_event_loop(); kept = loop.call_later(600, print)",
        after="assert not kept.cancelled()",
        kinds=("array",),
    ),
    "a queue": Case("outer.put(x)", setup="import queue; outer = queue.Queue()"),
    "a local of a thread": Case(
        "outer.data = x", setup="import threading; outer = threading.local()"
    ),
    "a future": Case(
        "outer.set_result(x)",
        setup="import concurrent.futures; outer = concurrent.futures.Future()",
    ),
    "a timer": Case(
        """
        timer = threading.Timer(600, print, [x])
        timer.daemon = True
        timer.start()
        """,
        setup="import threading",
        after="assert not any(type(thread) is threading.Timer for thread in threading.enumerate())",
    ),
    "a timer of threading in a list": Case(
        """
        timers.append(threading.Timer(600, print, [x]))
        timers[1].daemon = True
        timers[1].start()
        """,
        setup="""
        import threading
        timers = [threading.Timer(600, print)]
        timers[0].daemon = True
        timers[0].start()
        """,
        after="assert len(timers) == 1 and timers[0].is_alive(); timers[0].cancel()",
    ),
    "a timer's keyword argument": Case(
        """
        outer["t"] = threading.Timer(600, print, kwargs={"data": x})
        outer["t"].daemon = True
        outer["t"].start()
        """,
        setup="import threading; outer = {}",
        after="assert not outer",
    ),
    "a thread pool's future": Case(
        "outer.append(pool.submit(lambda data: data, x)); outer[0].result();",
        setup="""
        import concurrent.futures
        pool = concurrent.futures.ThreadPoolExecutor(1)
        outer = []
        """,
    ),
    "two attributes of a thread's local": Case(
        "outer.a = x; outer.b = x", setup="import threading; outer = threading.local()"
    ),
    "a context variable and a dict": Case(
        "outer['x'] = x; var.set(x);",
        setup="import contextvars; outer = {}; var = contextvars.ContextVar('var')",
    ),
    "a list of a thread's local": Case(
        "outer.items.append(x)",
        setup="import threading; outer = threading.local(); outer.items = [1]",
        after="assert outer.items == [1]",
    ),
    "a context variable without a name": Case(
        "contextvars.ContextVar('my_variable').set(x);", setup="import contextvars"
    ),
    "a priority queue": Case(
        "outer.put((1, x))",
        setup="import queue; outer = queue.PriorityQueue()",
        after="outer.put((2, 3)); assert outer.get() == (2, 3)",
    ),
    "a scheduler": Case(
        "outer.enter(600, 1, print, (x,));",
        setup="import sched; outer = sched.scheduler()",
        after="assert outer.empty()",
    ),
    "a queue next to others": Case(
        "outer.put(x); outer.put(2); outer.put(x);",
        setup="import queue; outer = queue.Queue(); outer.put(1)",
        after="""
        assert outer.unfinished_tasks == 2
        assert [outer.get(), outer.get()] == [1, 2]
        outer.task_done(); outer.task_done(); outer.join()
        """,
    ),
    "a full queue with a waiting thread": Case(
        "outer.put(x); producer.start();",
        setup="""
        import queue, threading
        outer = queue.Queue(2); outer.put(1)
        producer = threading.Thread(target=outer.put, args=[2], daemon=True)
        """,
        after="""
        producer.join(60)
        assert not producer.is_alive()
        assert list(outer.queue) == [1, 2]
        """,
    ),
    "a stack of threads": Case(
        "outer.put(x)",
        setup="import queue; outer = queue.LifoQueue(); outer.put(1)",
        after="assert outer.get() == 1; outer.task_done(); outer.join()",
    ),
    "a queue with tasks": Case(
        "outer.put(x)",
        setup="import queue; outer = queue.Queue()",
        after="assert outer.empty(); outer.join()",
    ),
    "a priority queue next to others": Case(
        "outer.put((1, x)); [outer.put((n, 0)) for n in (9, 2, 10, 11, 3)];",
        setup="import queue; outer = queue.PriorityQueue()",
        after="assert [outer.get()[0] for _ in range(5)] == [2, 3, 9, 10, 11]",
    ),
    "a simple queue": Case(
        "outer.put(x); outer.put(2)",
        setup="import queue; outer = queue.SimpleQueue(); outer.put(1)",
        after="assert [outer.get(), outer.get()] == [1, 2]",
    ),
    "a simple queue alone": Case(
        "outer.put(x)",
        setup="import queue; outer = queue.SimpleQueue()",
        after="assert outer.empty()",
    ),
    "a queue of asyncio": Case(
        "outer.put_nowait(x); outer.put_nowait(2)",
        setup="import asyncio; outer = asyncio.Queue(); outer.put_nowait(1)",
        after="""
        assert [outer.get_nowait(), outer.get_nowait()] == [1, 2]
        outer.task_done(); outer.task_done()
        assert outer._finished.is_set()
        """,
    ),
    "a queue of asyncio alone": Case(
        "outer.put_nowait(x)",
        setup="import asyncio; outer = asyncio.Queue()",
        after="assert outer.empty() and outer._finished.is_set()",
    ),
    "a priority queue of asyncio": Case(
        "outer.put_nowait((1, x)); [outer.put_nowait((n, 0)) for n in (9, 2, 10, 11, 3)];",
        setup="import asyncio; outer = asyncio.PriorityQueue()",
        after="assert [outer.get_nowait()[0] for _ in range(5)] == [2, 3, 9, 10, 11]",
    ),
    "a scheduler next to others": Case(
        "outer.enter(600, 1, print, (x,)); outer.enter(900, 1, print, (1,));",
        setup="import sched; outer = sched.scheduler(); outer.enter(100, 1, print, (1,));",
        after="assert [event.argument for event in outer.queue] == [(1,), (1,)]",
    ),
    "a pool's waiting call": Case(
        "pool.submit(len, [x]);",
        setup="""
        import concurrent.futures, threading
        gate = threading.Event()
        pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(gate.wait);
        """,
        after="gate.set(); assert pool.submit(len, [1]).result(60) == 1",
    ),
    "a buffer with a condition": Case(
        "outer.items.append(x); outer.items.append(2)",
        setup="""
        import collections, threading
        class Buffer:
            def __init__(self):
                self.items = collections.deque([1])
                self.changed = threading.Condition()
        outer = Buffer()
        """,
        after="assert list(outer.items) == [1, 2]",
    ),
    "a buffer with a semaphore": Case(
        "outer.items.append(x); outer.count.release()",
        setup="""
        import collections, threading
        class Buffer:
            def __init__(self):
                self.items = collections.deque()
                self.count = threading.Semaphore(0)
        outer = Buffer()
        """,
        sentences=("let your code take it",),
    ),
}
