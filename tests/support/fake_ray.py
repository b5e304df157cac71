"""Replaces Ray in tests of the engine `ray`: a task runs at once, in the process of the test."""

from concurrent.futures import Future
from types import SimpleNamespace

from modeling_nlq.training.run import ray_jobs, subprocess_run


class FakeError(BaseException):
    """An error of Ray, such as a node that died: nothing in the run's own code catches it."""


class LostError(FakeError, Exception):
    """The same error, as the driver sees it."""


class FakeTaskError(FakeError, Exception):
    """The error of a task."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """Stands for the module `ray` on a cluster of one node.

    Attributes:
        tasks: the options of each task that was made.
    """

    def __init__(self):
        self.tasks = []

    def install(self, monkeypatch) -> "FakeRay":
        """Takes the place of Ray for a test. Output is not redirected."""
        names = {"ray": self, "RayError": FakeError, "RayTaskError": FakeTaskError}
        names["NodeAffinitySchedulingStrategy"] = lambda *_, **__: None
        for name, value in names.items():
            monkeypatch.setattr(ray_jobs, name, value, raising=False)
        monkeypatch.setattr(subprocess_run, "_redirect_output", lambda log: log.write_text("the log\n"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        return self

    def remote(self, target=None, **options):
        if target is None:
            return lambda target: self.remote(target, **options)
        return _Remote(self, target, options)

    def nodes(self):
        return [{"Resources": {"CPU": 2, "GPU": 0}, "Alive": True}]

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "node")

    def cancel(self, reference, force):
        pass


class _Reference:
    def __init__(self, result):
        self.result = result

    def future(self) -> Future:
        future = Future()
        if isinstance(self.result, BaseException):
            future.set_exception(self.result)
        else:
            future.set_result(self.result)
        return future


class _Remote:
    """A function that was made remote."""

    def __init__(self, ray: FakeRay, target, options):
        self._ray, self._target, self._options = ray, target, options

    def remote(self, *arguments):
        self._ray.tasks.append(self._options)
        for _ in range(self._options["max_retries"] + 1):
            try:
                return _Reference(self._target(*arguments))
            except FakeError as lost:
                result = LostError(str(lost))
            except Exception as fault:  # a task's own is not retried
                return _Reference(FakeTaskError(fault))
        return _Reference(result)
