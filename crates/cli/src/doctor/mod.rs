//! What a job needs, looked at one by one.
//!
//! Each check has two parts: one that looks, and one that judges what was seen,
//! which is a function of its arguments. Every wait ends after [`TIMEOUT`].

mod network;
mod segments;
mod shared_memory;

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit};

use crate::DoctorArguments;
use crate::facts::PythonFacts;
use crate::report::{Check, Report};
use crate::ucx::UcxReport;

/// How long one check may wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The oldest torch that is supported.
const OLDEST_TORCH: (u32, u32) = (2, 7);

/// Every peer takes a connection, and torch and a data loader take files too.
const FEW_FILES: u64 = 1024;

/// Looks at everything.
pub fn examine(
    arguments: &DoctorArguments,
    python: &PythonFacts,
    ucx: Option<&UcxReport>,
) -> Report {
    let mut checks = vec![
        Check::ok("shardwright", env!("CARGO_PKG_VERSION")),
        Check::ok(
            "python",
            format!("{} ({})", python.python, python.executable),
        ),
        torch(python),
        cuda(python),
        judge_ucx(ucx),
    ];
    checks.extend(shared_memory::examine());
    checks.push(segments::examine());
    checks.push(network::loopback());
    checks.extend(network::names(&arguments.hosts));
    checks.push(open_files(getrlimit(Resource::Nofile)));
    Report { checks }
}

fn torch(python: &PythonFacts) -> Check {
    let mut numbers = python.torch.split('.').map(|part| part.parse::<u32>().ok());
    let version = (numbers.next().flatten(), numbers.next().flatten());
    match version {
        (Some(major), Some(minor)) if (major, minor) < OLDEST_TORCH => {
            let (major, minor) = OLDEST_TORCH;
            Check::warn(
                "torch",
                &python.torch,
                format!("install torch {major}.{minor} or newer"),
            )
        }
        _ => Check::ok("torch", &python.torch),
    }
}

fn cuda(python: &PythonFacts) -> Check {
    match (&python.cuda, python.devices.as_slice()) {
        (None, _) => Check::ok(
            "cuda",
            "torch was built without it: ranks compute on the CPU",
        ),
        (Some(version), []) => {
            let why = python
                .cuda_problem
                .as_deref()
                .unwrap_or("no device is here");
            let found = format!("torch was built for CUDA {version}, but {why}");
            Check::missing(
                "cuda",
                found,
                "nothing, if ranks are to compute on the CPU; else look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES",
            )
        }
        (Some(version), devices) => {
            let devices = devices.join(", ");
            Check::ok("cuda", format!("{version}, with {devices}"))
        }
    }
}

fn judge_ucx(ucx: Option<&UcxReport>) -> Check {
    const INSTALL: &str = "pip install 'shardwright[ucx]'";
    match ucx {
        None => Check::missing(
            "ucx",
            "this version of the library does not use it yet",
            "nothing: tensors travel over TCP",
        ),
        Some(UcxReport::NotFound { looked_at }) => Check::missing(
            "ucx",
            format!("not found; looked at {}", looked_at.join(", ")),
            format!(
                "{INSTALL}, or name a library by the key ucx_library; until then tensors travel over TCP"
            ),
        ),
        Some(UcxReport::Loaded {
            path,
            version,
            tested,
            transports,
        }) => {
            let found = format!("{version} at {path}, with {}", transports.join(", "));
            if *tested {
                Check::ok("ucx", found)
            } else {
                Check::warn(
                    "ucx",
                    found,
                    format!("this version is not tested: {INSTALL}"),
                )
            }
        }
    }
}

fn open_files(limit: Rlimit) -> Check {
    match limit.current {
        Some(files) if files < FEW_FILES => Check::warn(
            "open files",
            format!("at most {files} a process"),
            format!("ulimit -n {FEW_FILES} or more, before the job is started"),
        ),
        Some(files) => Check::ok("open files", format!("at most {files} a process")),
        None => Check::ok("open files", "no limit"),
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::Rlimit;

    use super::{cuda, judge_ucx, open_files, torch};
    use crate::facts::PythonFacts;
    use crate::report::CheckStatus::{Missing, Ok, Warn};
    use crate::ucx::UcxReport;

    #[test]
    fn an_old_torch_is_a_warning() {
        for (version, status) in [
            ("2.6.1", Warn),
            ("1.13.0+cu117", Warn),
            ("2.7.0", Ok),
            ("2.11.0+cu130", Ok),
            ("3.0.0a0+git", Ok),
            ("unknown", Ok),
        ] {
            let facts = PythonFacts {
                torch: version.to_owned(),
                ..PythonFacts::default()
            };
            assert_eq!(torch(&facts).status, status, "{version}");
        }
    }

    #[test]
    fn a_machine_without_a_device_is_no_obstacle() {
        let mut facts = PythonFacts::default();
        assert_eq!(cuda(&facts).status, Ok);
        facts.cuda = Some("13.0".to_owned());
        let check = cuda(&facts);
        assert_eq!((check.status, check.required), (Missing, false));
        facts.devices = vec!["H200".to_owned()];
        let check = cuda(&facts);
        assert_eq!(
            (check.status, check.found.as_str()),
            (Ok, "13.0, with H200")
        );
    }

    #[test]
    fn each_state_of_ucx_has_its_line() {
        let loaded = |tested| UcxReport::Loaded {
            path: "/usr/lib/libucp.so.0".to_owned(),
            version: "1.18.1".to_owned(),
            tested,
            transports: vec!["tcp".to_owned(), "sysv".to_owned()],
        };
        let missing = UcxReport::NotFound {
            looked_at: vec!["the system".to_owned()],
        };
        for (report, status, text) in [
            (None, Missing, "does not use it yet"),
            (Some(loaded(true)), Ok, "with tcp, sysv"),
            (Some(loaded(false)), Warn, "1.18.1"),
            (Some(missing), Missing, "looked at the system"),
        ] {
            let check = judge_ucx(report.as_ref());
            assert_eq!((check.status, check.required), (status, false));
            assert!(check.found.contains(text), "{check:?}");
        }
    }

    #[test]
    fn few_open_files_are_a_warning() {
        for (current, status) in [(Some(256), Warn), (Some(1024), Ok), (None, Ok)] {
            let limit = Rlimit {
                current,
                maximum: None,
            };
            assert_eq!(open_files(limit).status, status);
        }
    }
}
