//! Long waits from Python that signals end.

use pyo3::prelude::*;
use shardwright_comm::SLICE;

/// Works without the GIL, in slices between which signals get through; the
/// exception of a signal's handler ends the work and is raised.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> T + Send,
) -> PyResult<T> {
    let mut raised = None;
    let mut asked = std::time::Instant::now();
    let outcome = py.detach(|| {
        work(&mut || {
            if asked.elapsed() < SLICE {
                return true;
            }
            asked = std::time::Instant::now();
            match check_signals() {
                Ok(()) => true,
                Err(error) => {
                    raised = Some(error);
                    false
                }
            }
        })
    });
    raised.map_or(Ok(outcome), Err)
}

#[expect(
    clippy::disallowed_methods,
    clippy::redundant_closure_for_method_calls,
    reason = "the thread is Python's own, and asks between two slices of its wait; the closure is general over lifetimes"
)]
fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}
