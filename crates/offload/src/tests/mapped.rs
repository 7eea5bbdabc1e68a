//! A file in the place of memory.

use std::fs::read_to_string;
use std::path::PathBuf;
use std::sync::Arc;

use crate::mapped::{Mapped, MappedFile};

const MIB: usize = 1 << 20;

fn file() -> Arc<MappedFile> {
    MappedFile::make_in(std::env::temp_dir(), 3).expect("a file")
}

/// Of all mappings of the file that begin at an address, the bytes that are in memory.
fn resident(mapped: &Mapped) -> usize {
    let maps = read_to_string("/proc/self/smaps").expect("the kernel's account");
    let begin = format!("{:x}-", mapped.start().addr());
    let (_, rest) = maps.split_once(&begin).expect("it is mapped");
    let line = rest.lines().find_map(|line| line.strip_prefix("Rss:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB"));
    number
        .expect("a number")
        .trim()
        .parse::<usize>()
        .expect("a number")
        * 1024
}

#[test]
fn pages_come_and_go_and_their_bytes_stay() {
    let file = file();
    let mapped = file.map(8 * MIB + 100).expect("a place");
    mapped.load(0, mapped.len()).expect("the disk works");
    assert!(resident(&mapped) >= 8 * MIB);
    mapped.copy_in(5 * MIB - 3, &[1, 2, 3, 4, 5, 6, 7]);
    mapped.release(0, mapped.len());
    assert_eq!(resident(&mapped), 0);
    mapped.load(4 * MIB, 2 * MIB).expect("the disk works");
    assert!((2 * MIB..3 * MIB).contains(&resident(&mapped)));
    assert_eq!(mapped.copy_out(5 * MIB - 3, 7), [1, 2, 3, 4, 5, 6, 7]);
    mapped.release(0, usize::MAX);
    assert_eq!(resident(&mapped), 0);
    assert_eq!(mapped.copy_out(5 * MIB - 3, 7), [1, 2, 3, 4, 5, 6, 7]);
    mapped.load(usize::MAX, 1).expect("nothing is done");
}

#[test]
fn a_place_is_used_again_and_two_tensors_have_different_ones() {
    let file = file();
    let (one, other) = (
        file.map(MIB).expect("a place"),
        file.map(MIB).expect("a place"),
    );
    one.copy_in(0, &[1; 16]);
    other.copy_in(0, &[2; 16]);
    one.release(0, MIB);
    assert_eq!(
        (one.copy_out(0, 16), other.copy_out(0, 16)),
        (vec![1; 16], vec![2; 16])
    );
    let size = file.size();
    drop(one);
    let again = file.map(MIB).expect("a place");
    assert_eq!(file.size(), size);
    again.copy_in(0, &[3; 16]);
    assert_eq!(other.copy_out(0, 16), vec![2; 16]);
}

#[test]
fn a_file_that_cannot_be_made_and_a_place_that_is_not_there_are_named() {
    let error = MappedFile::make_in(PathBuf::from("/no/such/directory"), 3).expect_err("nowhere");
    for part in [
        "rank 3",
        "the optimizer's state",
        "/no/such/directory",
        "\"offload_directory\"",
    ] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = file().map(1 << 59).expect_err("no disk has as much");
    let directory = std::env::temp_dir().display().to_string();
    for part in [
        "rank 3 could not set aside",
        &(1_u64 << 59).to_string(),
        &directory,
    ] {
        assert!(error.to_string().contains(part), "{error}");
    }
}
