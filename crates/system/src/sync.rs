//! By what threads meet: the standard library's means, or those of shuttle, under which a check chooses the order in
//! which threads run (`docs/design/concurrency.md`).
//!
//! Under shuttle a wait with a limit has none: a wake-up that is lost does not hide behind the limit.

#[cfg(not(feature = "shuttle"))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread,
};

#[cfg(feature = "shuttle")]
pub use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread,
};

/// Where another thread may come in between: before memory is looked at that others write without a lock of this module.
#[cfg(not(feature = "shuttle"))]
#[inline]
pub fn others_may_run() {}

/// As above.
#[cfg(feature = "shuttle")]
pub fn others_may_run() {
    atomic::AtomicBool::new(false).load(atomic::Ordering::SeqCst);
}

/// Runs a check under so many orders of its threads, always the same ones: half of them are drawn step by step, in half of
/// them a few changes of thread are drawn (PCT). Says how many it ran; panics, with the order, where the check does or where
/// all threads wait.
#[cfg(feature = "shuttle")]
#[expect(
    clippy::print_stdout,
    reason = "the caller of the checks counts the orders"
)]
pub fn explore(schedules: usize, check: fn()) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::{Config, Runner};

    /// How many changes of thread a PCT order has.
    const CHANGES: usize = 4;
    /// Of each of a check's threads.
    const STACK_BYTES: usize = 256 << 10;

    let config = || {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        config
    };
    let began = std::time::Instant::now();
    let drawn = RandomScheduler::new_from_seed(1, schedules - schedules / 2);
    let mut ran = Runner::new(drawn, config()).run(check);
    let few = PctScheduler::new_from_seed(2, CHANGES, schedules / 2);
    ran += Runner::new(few, config()).run(check);
    let test = std::thread::current();
    let law = test.name().unwrap_or("a check").to_owned();
    println!("explored {law} {ran} {:.2}", began.elapsed().as_secs_f64());
}

/// Runs the functions of a check on threads of their own until all have ended.
#[cfg(feature = "shuttle")]
pub fn on_threads(each: impl IntoIterator<Item = Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = each.into_iter().map(thread::spawn).collect();
    for thread in threads {
        thread
            .join()
            .expect("shuttle ends the check where a thread panics");
    }
}

/// A function of a thread of a check that shares something.
#[cfg(feature = "shuttle")]
pub fn with<T: Send + Sync + 'static>(
    shared: &std::sync::Arc<T>,
    run: impl FnOnce(&T) + Send + 'static,
) -> Box<dyn FnOnce() + Send> {
    let shared = std::sync::Arc::clone(shared);
    Box::new(move || run(&shared))
}
