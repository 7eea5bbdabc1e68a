//! Finding UCX.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::raw::UcpFunctions;

/// The library's name in the system's directories and in every other.
const LIBRARY_NAME: &str = "libucp.so.0";

/// The oldest version that is accepted.
pub(crate) const OLDEST_VERSION: Version = Version {
    major: 1,
    minor: 15,
    release: 0,
};

/// The newest version that was tested (its releases count as tested).
pub(crate) const NEWEST_TESTED_VERSION: Version = Version {
    major: 1,
    minor: 22,
    release: 0,
};

/// What UCX reads while it is being loaded: it would replace functions of libc to watch the
/// memory, take over signals, and write its messages to the standard output.
const LOAD_SETTINGS: &[(&str, &str)] = &[
    ("UCX_MEM_EVENTS", "n"),
    ("UCX_MEM_MMAP_HOOK_MODE", "none"),
    ("UCX_MEM_MALLOC_HOOKS", "n"),
    ("UCX_MEM_MALLOC_RELOC", "n"),
    ("UCX_MEM_CUDA_HOOK_MODE", "none"),
    // Without the memory's events a cache of its kinds would go stale.
    ("UCX_MEMTYPE_CACHE", "n"),
    ("UCX_HANDLE_ERRORS", "none"),
    ("UCX_ERROR_SIGNALS", ""),
    ("UCX_DEBUG_SIGNO", "0"),
    ("UCX_VFS_ENABLE", "n"),
    ("UCX_WARN_UNUSED_ENV_VARS", "n"),
];

/// Settings that a user's own value of the same name wins over.
const LOAD_DEFAULTS: &[(&str, &str)] = &[("UCX_LOG_LEVEL", "fatal")];

/// Whether the UCX of this process was loaded with these settings: the dynamic linker loads a library once.
static LOADED_HERE: AtomicBool = AtomicBool::new(false);

/// A version of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// Where a library was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The configured path.
    Configured,
    /// The system's directories.
    System,
    /// A Python package.
    Package,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Configured => "configured path",
            Self::System => "system",
            Self::Package => "Python package",
        })
    }
}

/// Where to look, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    /// A directory or file; when given, nothing else is tried.
    pub configured: Option<PathBuf>,
    /// Whether to leave the system's directories out.
    pub without_system: bool,
    /// Directories of Python packages that hold the library.
    pub packages: Vec<PathBuf>,
}

/// One place that was tried in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// What kind of place.
    pub source: Source,
    /// The place.
    pub path: PathBuf,
    /// What was wrong.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} {}: {}",
            self.source,
            self.path.display(),
            self.reason
        )
    }
}

/// UCX was not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("UCX was not found; tried: {}", list(tried))]
pub struct LibraryError {
    /// All places, in order.
    pub tried: Vec<Attempt>,
}

fn list(tried: &[Attempt]) -> String {
    let lines: Vec<String> = tried.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedLibrary {
    /// In what kind of place.
    pub source: Source,
    /// The file, as far as the process's memory map tells.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// Whether it is newer than what was tested.
    pub newer_than_tested: bool,
    /// Whether UCX was in the process before: then its hooks and signal handlers are as whoever
    /// loaded it wanted them.
    pub loaded_before: bool,
}

/// UCX, loaded for the rest of the process's life.
#[derive(Clone)]
pub struct Library {
    functions: Arc<UcpFunctions>,
    found: LoadedLibrary,
}

impl fmt::Debug for Library {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Library").field(&self.found).finish()
    }
}

impl Library {
    /// Loads the first candidate that works.
    pub fn find(candidates: &Candidates) -> Result<Self, LibraryError> {
        let mut tried = Vec::new();
        for (source, path) in candidates.list() {
            match Self::load(source, &path) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(Attempt {
                    source,
                    path,
                    reason,
                }),
            }
        }
        Err(LibraryError { tried })
    }

    fn load(source: Source, path: &Path) -> Result<Self, String> {
        let before = mapped();
        if path.exists() {
            check_company(path, &before)?;
        }
        let mut version = OLDEST_VERSION;
        let functions = UcpFunctions::load(path.as_os_str(), &load_settings(), |numbers| {
            let (major, minor, release) = numbers;
            version = Version {
                major,
                minor,
                release,
            };
            check_version(version)
        })?;
        if before.is_empty() {
            LOADED_HERE.store(true, Ordering::Relaxed);
        }
        let main = |file: &&PathBuf| is_called(file, "libucp.so");
        let file = mapped().iter().find(main).cloned();
        Ok(Self {
            functions: Arc::new(functions),
            found: LoadedLibrary {
                source,
                path: file.unwrap_or_else(|| path.to_owned()),
                version,
                newer_than_tested: is_newer_than_tested(version),
                loaded_before: !LOADED_HERE.load(Ordering::Relaxed),
            },
        })
    }

    /// What was found.
    pub fn found(&self) -> &LoadedLibrary {
        &self.found
    }

    pub(crate) fn functions(&self) -> &Arc<UcpFunctions> {
        &self.functions
    }
}

impl Candidates {
    /// The files to load, in order.
    fn list(&self) -> Vec<(Source, PathBuf)> {
        let file = |path: &Path| {
            if path.is_dir() {
                path.join(LIBRARY_NAME)
            } else {
                path.to_owned()
            }
        };
        if let Some(path) = &self.configured {
            return vec![(Source::Configured, file(path))];
        }
        let system = (!self.without_system).then(|| (Source::System, PathBuf::from(LIBRARY_NAME)));
        let packages = self
            .packages
            .iter()
            .map(|path| (Source::Package, file(path)));
        system.into_iter().chain(packages).collect()
    }
}

fn load_settings() -> Vec<String> {
    let setting = |(name, value): &(&str, &str)| format!("{name}={value}");
    let defaults = LOAD_DEFAULTS
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none());
    LOAD_SETTINGS.iter().chain(defaults).map(setting).collect()
}

fn check_version(version: Version) -> Result<(), String> {
    if version < OLDEST_VERSION {
        return Err(format!(
            "version {version} is older than {OLDEST_VERSION}, the oldest that is supported"
        ));
    }
    Ok(())
}

fn is_newer_than_tested(version: Version) -> bool {
    let tested = NEWEST_TESTED_VERSION;
    (version.major, version.minor) > (tested.major, tested.minor)
}

/// A UCX that is in the process already, of which a second one from elsewhere would share parts.
fn check_company(path: &Path, mapped: &BTreeSet<PathBuf>) -> Result<(), String> {
    let Some(directory) = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    else {
        return Ok(());
    };
    let directory = directory.canonicalize().unwrap_or(directory.to_owned());
    match mapped.iter().find(|file| !file.starts_with(&directory)) {
        Some(other) => Err(format!(
            "the process already holds another UCX, {}, and the two would mix",
            other.display()
        )),
        None => Ok(()),
    }
}

/// UCX's files that the process has mapped.
fn mapped() -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter_map(|line| line.split_once('/'))
        .map(|(_, path)| Path::new("/").join(path))
        .filter(|path| is_called(path, "libucp.so") || is_called(path, "libucs.so"))
        .collect()
}

fn is_called(path: &Path, start: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u32, minor: u32, release: u32) -> Version {
        Version {
            major,
            minor,
            release,
        }
    }

    #[test]
    fn an_older_version_is_refused_by_name_and_a_newer_one_is_marked() {
        let refused = check_version(version(1, 14, 3)).unwrap_err();
        assert_eq!(
            refused,
            "version 1.14.3 is older than 1.15.0, the oldest that is supported"
        );
        for accepted in [OLDEST_VERSION, version(1, 22, 9), version(2, 0, 0)] {
            assert_eq!(check_version(accepted), Ok(()));
        }
        assert!(!is_newer_than_tested(version(1, 22, 9)));
        assert!(is_newer_than_tested(version(1, 23, 0)));
        assert!(is_newer_than_tested(version(2, 0, 0)));
    }

    #[test]
    fn a_second_ucx_beside_another_one_is_refused() {
        let mapped = BTreeSet::from([PathBuf::from("/usr/lib/libucs.so.0.0.0")]);
        let refused = check_company(Path::new("/elsewhere/libucp.so.0"), &mapped).unwrap_err();
        assert!(refused.contains("/usr/lib/libucs.so.0.0.0"), "{refused}");
        for same in ["/usr/lib/libucp.so.0", "libucp.so.0"] {
            assert_eq!(check_company(Path::new(same), &mapped), Ok(()));
        }
        assert_eq!(
            check_company(Path::new("/elsewhere/x"), &BTreeSet::new()),
            Ok(())
        );
    }
}
