//! Models of others that are not what they say.

use std::fs;
use std::num::NonZeroU16;

use super::files::Scratch;
use crate::{Checkpoint, Directory, ForeignModel};

/// A file of the format: its header, and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn refusal(scratch: &Scratch) -> String {
    ForeignModel::open(scratch.path()).unwrap_err().to_string()
}

#[test]
fn headers_that_cannot_be_true_are_refused_by_name() {
    let scratch = Scratch::new();
    let path = scratch.path().join("model.safetensors");
    let a = r#""a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let cases = [
        (entry("U8", "[2]", "[0,3]"), 3, "0 to 3 are not its 2 bytes"),
        (entry("U8", "[2]", "[2,0]"), 2, "2 to 0 are not its 2 bytes"),
        (entry("U8", "[2]", "[1,3]"), 3, "it begins at 1"),
        (
            entry("U8", "[2]", "[0,2]"),
            3,
            "end at byte 2 of its 3 bytes",
        ),
        (
            entry("U8", "[9]", "[0,9]"),
            3,
            "end at byte 9 of its 3 bytes",
        ),
        (entry("F4", "[2]", "[0,1]"), 1, "less than a byte"),
        (
            entry("F64", "[4294967296,4294967296]", "[0,0]"),
            0,
            "beyond 64 bits",
        ),
        (
            entry("X9", "[2]", "[0,2]"),
            2,
            "\"a\": unknown variant `X9`",
        ),
        (entry("U8", "[-2]", "[0,2]"), 2, "\"a\": invalid value"),
        (entry("U8", "[2]", "[0,2,4]"), 2, "\"a\": "),
        (format!("{{{a},{a}}}"), 2, "\"a\" is there twice"),
        (
            format!(r#"{{{a},"b":{{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}}}"#),
            3,
            "\"b\": it begins at 1, and the one before it ends at 2",
        ),
        (
            format!(r#"{{"__metadata__":{{"format":"tf"}},{a}}}"#),
            2,
            "format \"tf\"",
        ),
        (
            format!(r#"{{"__metadata__":{{}},"__metadata__":{{}},{a}}}"#),
            2,
            "twice",
        ),
        (format!(r#"{{"__metadata__":3,{a}}}"#), 2, "__metadata__"),
        (format!(" {{{a}}}"), 2, "does not begin with a brace"),
        (format!("{{{a}"), 2, "EOF"),
        ("[".repeat(1000), 0, "does not begin with a brace"),
        (format!("{{\"a\":{}", "[".repeat(100_000)), 0, "\"a\""),
    ];
    for (header, data, expected) in cases {
        fs::write(&path, file(&header, data)).unwrap();
        let found = refusal(&scratch);
        let known = found.contains(expected) && found.contains("model.safetensors");
        assert!(known, "{expected:?} is not in {found:?}");
    }
    for (bytes, expected) in [
        (vec![1, 2], "it has 2 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "the format allows"),
        (99u64.to_le_bytes().to_vec(), "its header alone 107"),
    ] {
        fs::write(&path, bytes).unwrap();
        assert!(
            refusal(&scratch).contains(expected),
            "{}",
            refusal(&scratch)
        );
    }
}

#[test]
fn an_index_that_cannot_be_true_is_refused_by_name() {
    let scratch = Scratch::new();
    let one = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    fs::write(scratch.path().join("one"), file(one, 2)).unwrap();
    let cases = [
        (
            r#"{"weight_map":{"a":"../one"}}"#,
            "cannot be the name of a file of a model",
        ),
        (
            r#"{"weight_map":{"a":"/etc/passwd"}}"#,
            "cannot be the name",
        ),
        (r#"{"weight_map":{"a":"none"}}"#, "No such file"),
        (
            r#"{"weight_map":{"b":"one"}}"#,
            "\"a\" is in it, but not by the index",
        ),
        (
            r#"{"weight_map":{"a":"one","b":"one"}}"#,
            "\"b\" is in it by the index",
        ),
        (
            r#"{"weight_map":{"a":"one","a":"one"}}"#,
            "\"a\" is there twice",
        ),
        (r#"{"weight_map":[]}"#, "index.json"),
        ("{}", "missing field `weight_map`"),
    ];
    for (index, expected) in cases {
        fs::write(scratch.path().join("model.safetensors.index.json"), index).unwrap();
        let found = refusal(&scratch);
        assert!(found.contains(expected), "{expected:?} is not in {found:?}");
    }
}

#[test]
fn other_formats_are_named() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("pytorch_model.bin"), "").unwrap();
    assert!(refusal(&scratch).contains("such as pickles, are not read"));
}

#[test]
fn a_file_that_shrinks_while_it_is_imported_is_named_and_nothing_is_left() {
    let scratch = Scratch::new();
    let path = scratch.path().join("model.safetensors");
    let one = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    let whole = file(one, 2);
    fs::write(&path, &whole).unwrap();
    let mut model = ForeignModel::open(scratch.path()).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let into = Directory::new(scratch.path().join("out")).unwrap();
    let parts = NonZeroU16::MIN;
    let error = model.import(&into, "t", parts, false, &mut |_| {});
    assert!(error.unwrap_err().to_string().contains("model.safetensors"));
    assert!(!into.path().exists());
    fs::write(&path, &whole).unwrap();
    model.import(&into, "t", parts, false, &mut |_| {}).unwrap();
    let checkpoint = Checkpoint::open(&into, None).unwrap();
    assert_eq!(super::files::load(&checkpoint, "model/a").unwrap(), [7, 7]);
}
