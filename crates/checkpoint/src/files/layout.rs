//! How a directory of checkpoints lies in an object store: addresses, names of objects, sizes of uploads. Pure.

use std::path::Path;

use crate::names::WRITING;

/// Begins the addresses of directories in a store.
const SCHEME: &str = "s3://";
/// What is left of it where a path type of Python has joined the slashes.
const JOINED: &str = "s3:/";

/// How many bytes an upload sends at once; smaller objects are sent whole.
pub(crate) const SENT_BYTES: u64 = 8 << 20;
/// How many such parts S3 takes for an object.
const MAX_SENT: u64 = 10_000;

/// The bytes of an attempt's number.
pub(crate) const ATTEMPT_BYTES: usize = 8;
/// What the names of files with tensors end with.
const TENSORS: &str = ".safetensors";

/// Whether a path is an address in a store, though perhaps not a correct one.
pub(crate) fn is_address(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(JOINED))
}

/// Refuses what would be taken as a folder in silence: an address of another kind, and an empty path.
pub(crate) fn check_place(path: &Path) -> Result<(), &'static str> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() {
        return Err(
            "it is empty; allowed are a folder (the current one is \".\") and s3://BUCKET/PREFIX",
        );
    }
    if !is_address(path) && has_scheme(bytes) {
        return Err(
            "it is an address of another kind; allowed are a folder (\"./\" before its path if that has a colon) and \
             s3://BUCKET/PREFIX",
        );
    }
    Ok(())
}

/// Whether a text begins as addresses do: `gs://`, or `gs:/` where a path type has joined the slashes.
fn has_scheme(text: &[u8]) -> bool {
    let Some(colon) = text.iter().position(|one| *one == b':') else {
        return false;
    };
    let (scheme, rest) = text.split_at(colon);
    let is_of_scheme = |one: &u8| one.is_ascii_alphanumeric() || b"+-.".contains(one);
    scheme.len() > 1
        && scheme[0].is_ascii_alphabetic()
        && scheme.iter().all(is_of_scheme)
        && rest.get(1) == Some(&b'/')
}

/// An address: a bucket, and the key of what is meant in it, which is empty for all of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address<'a> {
    pub(crate) bucket: &'a str,
    pub(crate) key: &'a str,
}

impl<'a> Address<'a> {
    /// Reads it, or says what is wrong with it.
    pub(crate) fn parse(text: &'a str) -> Result<Self, &'static str> {
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return Err("it has one slash, as after pathlib.Path: give it as text");
        };
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err("it names no bucket");
        }
        if bucket.contains(['?', '#', '@', ':', '\\', ' ']) {
            return Err("the bucket's name has a character that no bucket has");
        }
        let key = key.strip_suffix('/').unwrap_or(key);
        let mut segments = key.split('/');
        if !key.is_empty() && segments.any(|one| ["", ".", ".."].contains(&one)) {
            return Err("a part of its path is empty, or dots");
        }
        Ok(Self { bucket, key })
    }
}

/// The name under which an attempt to save writes a file, different from those of all other attempts.
pub(crate) fn name_of_attempt(name: &str, attempt: [u8; ATTEMPT_BYTES]) -> String {
    let (stem, end) = match name.strip_suffix(TENSORS) {
        Some(stem) => (stem, TENSORS),
        None => (name, ""),
    };
    format!("{stem}.{:016x}{end}", u64::from_be_bytes(attempt))
}

/// Whether saves write objects of such a name: those that a manifest does not name are of a save that goes on, or that was
/// ended, and not of the checkpoint.
pub(crate) fn is_of_a_save(name: &str) -> bool {
    let stem = name.strip_suffix(TENSORS).unwrap_or(name);
    let attempt = stem.rsplit_once('.').map(|(_, attempt)| attempt);
    let digits = |text: &str| {
        text.bytes()
            .all(|one| matches!(one, b'0'..=b'9' | b'a'..=b'f'))
    };
    name.ends_with(WRITING)
        || attempt.is_some_and(|text| text.len() == 2 * ATTEMPT_BYTES && digits(text))
}

/// How many bytes an upload of an object of this size sends at once: as many as [`SENT_BYTES`], or so many that S3 takes
/// the object.
pub(crate) fn sent_bytes(object: u64) -> u64 {
    SENT_BYTES.max(object.div_ceil(MAX_SENT))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::{
        Address, MAX_SENT, SENT_BYTES, check_place, is_address, is_of_a_save, name_of_attempt,
        sent_bytes,
    };

    #[test]
    fn addresses_are_a_bucket_and_a_path() {
        let parsed = |text| Address::parse(text).map(|one| (one.bucket, one.key));
        assert_eq!(parsed("s3://b"), Ok(("b", "")));
        assert_eq!(parsed("s3://b/"), Ok(("b", "")));
        assert_eq!(parsed("s3://b/x/y z/"), Ok(("b", "x/y z")));
        for text in [
            "s3://",
            "s3:///x",
            "s3://b//x",
            "s3://b/x/../y",
            "s3://b/.",
            "s3:/b/x",
            "s3://b?c/x",
        ] {
            assert!(parsed(text).is_err(), "{text}");
        }
        for text in ["s3:/b/x", "s3://b"] {
            assert!(is_address(Path::new(text)), "{text}");
        }
        for text in ["s3", "/s3://b", "./s3:/x", "s3x://b", ""] {
            assert!(!is_address(Path::new(text)), "{text}");
        }
    }

    #[test]
    fn addresses_of_other_stores_are_no_folders() {
        for text in [
            "",
            "S3://b/x",
            "S3:/b/x",
            "s3a://b",
            "gs://b/x",
            "gs:/b/x",
            "http://host:1/x",
            "file:///x",
            "az+blob://b",
        ] {
            assert!(check_place(Path::new(text)).is_err(), "{text}");
        }
        for text in [
            "s3://b/x",
            "s3:/b",
            "x",
            "/x",
            "./gs://b",
            "a/b://c",
            "a:b",
            "run-12:30/x",
            ".",
            ":/x",
            "c:/x",
            "7z:/x",
        ] {
            assert!(check_place(Path::new(text)).is_ok(), "{text}");
        }
    }

    #[test]
    fn what_no_save_writes_is_told_from_what_one_wrote() {
        for name in [
            "part-0.safetensors",
            "notes.txt",
            "a.0123456789abcde.safetensors",
            "a.0123456789ABCDEF",
            "0123456789abcdef",
        ] {
            assert!(!is_of_a_save(name), "{name}");
        }
        assert!(is_of_a_save("report-1.writing"));
    }

    proptest! {
        #[test]
        fn attempts_have_names_of_their_own(
            name in "[a-z0-9.-]{1,12}(\\.safetensors)?", one in any::<[u8; 8]>(), other in any::<[u8; 8]>(),
        ) {
            let named = name_of_attempt(&name, one);
            prop_assert!(is_of_a_save(&named));
            prop_assert_eq!(named.ends_with(".safetensors"), name.ends_with(".safetensors"));
            prop_assert_eq!(one == other, named == name_of_attempt(&name, other));
        }

        #[test]
        fn uploads_of_any_size_have_parts_that_a_store_takes(bytes in 0u64..50 << 40) {
            let sent = sent_bytes(bytes);
            prop_assert!(sent >= SENT_BYTES);
            prop_assert!(bytes.div_ceil(sent) <= MAX_SENT);
            prop_assert!(sent == SENT_BYTES || (sent - 1) * MAX_SENT < bytes);
        }
    }
}
