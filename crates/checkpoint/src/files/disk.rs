//! Files and folders of a disk, opened as what somebody else may have put there: no link is followed, nothing but a regular
//! file is read or written, and no more is read than was allowed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

/// What file systems of networks leave of a file that was removed while somebody had it open; it goes by itself.
const LEFT_BY_NFS: &str = ".nfs";

/// Whether an entry of a folder is nobody's, and goes by itself.
pub(crate) fn goes_by_itself(name: &str) -> bool {
    name.starts_with(LEFT_BY_NFS)
}

/// Opens a regular file, which is no link.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    open_with(path, OFlags::NOFOLLOW)
}

/// Opens a regular file that may be a link, as those of other libraries are.
pub(crate) fn open_linked(path: &Path) -> io::Result<File> {
    open_with(path, OFlags::empty())
}

fn open_with(path: &Path, flags: OFlags) -> io::Result<File> {
    // Without NONBLOCK, to open a pipe would wait for somebody who writes.
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let file = opened.map_err(|error| {
        if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
            io::Error::other("it is a symbolic link, and links are not followed here")
        } else {
            error
        }
    })?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is no regular file"))
    }
}

/// All bytes of a file, of which so many are allowed.
pub(crate) fn read(file: &File, allowed: u64) -> io::Result<Vec<u8>> {
    let refused = |found: u64| {
        let problem = format!("it has {found} bytes, and {allowed} are allowed");
        Err(io::Error::other(problem))
    };
    let found = file.metadata()?.len();
    if found > allowed {
        return refused(found);
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(found as usize + 1)?;
    file.take(allowed + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > allowed {
        return refused(bytes.len() as u64); // it has grown meanwhile
    }
    Ok(bytes)
}

/// Creates a file, in place of whatever is there under its name: neither a link, nor another name of a file, is written
/// through.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    match File::create_new(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            File::create_new(path)
        }
        created => created,
    }
}

/// Makes a folder that may be there, but not as a link to another; those that it is in are where the user says.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            make_last(path)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => check_folder(path),
        made => made,
    }
}

/// The folders of a path that are not there, the innermost first.
pub(crate) fn missing(path: &Path) -> Vec<PathBuf> {
    let is_missing = |one: &&Path| !one.as_os_str().is_empty() && one.symlink_metadata().is_err();
    let all = path.ancestors().take_while(is_missing);
    all.map(Path::to_owned).collect()
}

/// Removes folders that something made which has failed; others may have put something in them, which stays.
pub(crate) fn remove_empty(folders: &[PathBuf]) {
    for folder in folders {
        fs::remove_dir(folder).ok();
    }
}

fn make_last(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => check_folder(path),
        made => made,
    }
}

/// Refuses what is no folder, or a link to one.
pub(crate) fn check_folder(path: &Path) -> io::Result<()> {
    let found = path.symlink_metadata()?;
    if found.is_dir() {
        Ok(())
    } else if found.is_symlink() {
        Err(io::Error::other(
            "it is a symbolic link, and links are not followed here: give the folder that it leads to",
        ))
    } else {
        Err(io::Error::from(ErrorKind::NotADirectory))
    }
}

/// Opens a folder, where a pipe would wait.
pub(crate) fn open_folder(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::DIRECTORY.bits().cast_signed())
        .open(path)
}
