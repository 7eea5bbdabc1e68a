//! The front's gradients are exact under every kind of schedule.

use std::process::Command;

#[test]
fn gradients_over_two_processes_are_exact_under_every_schedule() {
    let schedules = [
        "simple",
        "interleaved(active=2)",
        "interleaved(active=6)",
        "looped(active=3)",
        "zero_bubble(active=2)",
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_rust_front"))
        .args(["the secret of the test", "0"])
        .args(schedules)
        .output()
        .expect("the program starts");
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{said}{errors}");
    for schedule in schedules {
        // Rank 0 has two modules, rank 1 has three; each has a gradient for each of six microbatches.
        for (rank, gradients) in [(0, 12), (1, 18)] {
            let line = format!("rank {rank}: {gradients} gradients are exact under {schedule}");
            assert!(said.contains(&line), "{said}{errors}");
        }
    }
}
