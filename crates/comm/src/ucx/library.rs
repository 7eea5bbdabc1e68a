//! Finding UCX.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::raw::Functions;

/// The library's name in the system's directories and in every other.
const LIBRARY_NAME: &str = "libucp.so.0";

/// The oldest version that is accepted.
pub const OLDEST_VERSION: Version = Version {
    major: 1,
    minor: 15,
    release: 0,
};

/// The newest version that was tested (its releases count as tested).
pub const NEWEST_TESTED_VERSION: Version = Version {
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
pub struct Found {
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
    functions: Arc<Functions>,
    found: Found,
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
        let functions = Functions::load(path.as_os_str(), &load_settings())?;
        let (major, minor, release) = functions.version();
        let version = Version {
            major,
            minor,
            release,
        };
        check_version(version)?;
        let own_name = OsStr::new(path.file_name().unwrap_or_default());
        let mapped = mapped();
        let file = mapped
            .iter()
            .find(|file| file.starts_with(path.parent().unwrap_or(path)));
        Ok(Self {
            functions: Arc::new(functions),
            found: Found {
                source,
                path: file
                    .or(mapped.first())
                    .map_or_else(|| PathBuf::from(own_name), Clone::clone),
                version,
                newer_than_tested: is_newer_than_tested(version),
                loaded_before: !before.is_empty(),
            },
        })
    }

    /// What was found.
    pub fn found(&self) -> &Found {
        &self.found
    }

    pub(crate) fn functions(&self) -> &Arc<Functions> {
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

/// The files called like the library that the process has mapped.
fn mapped() -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter_map(|line| line.split_once('/'))
        .map(|(_, path)| Path::new("/").join(path))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libucp.so")
        })
        .collect()
}
