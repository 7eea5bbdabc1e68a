//! The fuzzer's kept inputs, run through its targets on every change.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use shardwright_checkpoint::{Manifest, check_header, seal};
use shardwright_fuzzing::TARGETS;

#[test]
fn every_kept_input_keeps_the_laws() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, target) in TARGETS {
        let folder = corpus.join(name);
        let mut files: Vec<PathBuf> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(!files.is_empty(), "{} is empty", folder.display());
        for file in files {
            let input = fs::read(&file).unwrap();
            let kept = std::panic::catch_unwind(|| target(&input)).is_ok();
            assert!(kept, "{} breaks a law of target {name}", file.display());
        }
    }
}

proptest! {
    #[test]
    fn random_inputs_keep_the_laws(input in prop::collection::vec(any::<u8>(), 0..400)) {
        for (_, target) in TARGETS {
            target(&input);
        }
    }
}

fn golden(name: &str) -> Vec<u8> {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    fs::read(corpus.join(name)).expect("the file is kept")
}

fn golden_manifest() -> Vec<u8> {
    golden("manifest/golden-parts")
}

#[test]
fn the_golden_header_is_accepted() {
    assert_eq!(check_header(&golden("header/golden-header")), Ok(26));
}

#[test]
fn the_golden_manifest_is_accepted() {
    let text = String::from_utf8(golden_manifest()).unwrap();
    assert!(Manifest::from_bytes(&seal(&text)).is_ok());
}

proptest! {
    #[test]
    fn headers_with_other_bytes_keep_the_laws(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b' '..=b'}'), 1..4),
    ) {
        let mut text = golden("header/golden-header");
        for (place, byte) in changes {
            let place = place.index(text.len());
            text[place] = byte;
        }
        shardwright_fuzzing::header(&text);
    }

    #[test]
    fn manifests_with_other_numbers_keep_the_laws(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..5),
    ) {
        let mut text = golden_manifest();
        let digits = text.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit());
        let digits: Vec<usize> = digits.map(|(place, _)| place).collect();
        for (place, digit) in changes {
            text[*place.get(&digits)] = digit;
        }
        shardwright_fuzzing::manifest(&text);
    }
}
