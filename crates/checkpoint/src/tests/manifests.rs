//! What is a manifest, and what is refused.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::division::{Divided, description, divided, in_memory, manifest};
use crate::{
    Alias, Difference, Dtype, FORMAT_VERSION, Manifest, ManifestError, Region, TensorKind,
    assemble, differences, seal,
};

fn two_halves() -> Divided {
    Divided {
        name: "b".to_owned(),
        dtype: Dtype::F32,
        shape: vec![4, 2],
        bytes: (0..32).collect(),
        pieces: vec![
            (0, Region::boxed(vec![0, 0], vec![2, 2])),
            (1, Region::whole(&[4, 2]).run(4, 4)),
        ],
    }
}

fn small() -> Manifest {
    let empty = Divided {
        name: "a".to_owned(),
        dtype: Dtype::F32,
        shape: vec![0, 3],
        bytes: Vec::new(),
        pieces: vec![(0, Region::whole(&[0, 3]))],
    };
    let (mut manifest, _) = manifest(&[empty, two_halves()], 2);
    manifest.aliases.push(Alias {
        name: "tied".to_owned(),
        of: "b".to_owned(),
    });
    manifest
}

fn object(manifest: &Manifest) -> Value {
    let bytes = manifest.to_bytes();
    let mut object: Value = serde_json::from_slice(&bytes).unwrap();
    object
        .as_object_mut()
        .unwrap()
        .shift_remove("blake3")
        .unwrap();
    object
}

fn refused(object: &Value) -> ManifestError {
    Manifest::from_bytes(&seal(&object.to_string())).unwrap_err()
}

#[test]
fn a_manifest_is_one_json_object_and_comes_back_as_it_was() {
    let manifest = small();
    let bytes = manifest.to_bytes();
    assert_eq!(Manifest::from_bytes(&bytes).unwrap(), manifest);
    assert_eq!(manifest.tensor("tied"), manifest.tensor("b"));
    assert!(manifest.tensor("a").unwrap().pieces.is_empty());
    assert!(serde_json::from_slice::<Value>(&bytes).unwrap().is_object());
}

#[test]
fn every_changed_or_missing_byte_is_noticed() {
    let bytes = small().to_bytes();
    for place in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[place] ^= 1 << bit;
            let found = Manifest::from_bytes(&changed);
            assert!(
                matches!(found, Err(ManifestError::Altered { .. })),
                "bit {bit} of byte {place}: {found:?}"
            );
        }
        let cut = Manifest::from_bytes(&bytes[..place]);
        assert!(matches!(cut, Err(ManifestError::Altered { .. })));
    }
    let longer = Manifest::from_bytes(&[&bytes[..], b" "].concat());
    assert!(matches!(longer, Err(ManifestError::Altered { .. })));
}

#[test]
fn a_newer_format_is_refused_by_name() {
    let mut object = object(&small());
    object["format_version"] = json!(FORMAT_VERSION + 1);
    object["something_new"] = json!(true);
    let expected = "it has format_version 2; this version of the library reads up to 1";
    assert_eq!(refused(&object).to_string(), expected);
}

/// A place, what is put there, and how the error begins.
const UNTRUE: &[(&str, &str, &str)] = &[
    ("/format_version", "0", "format_version: no version"),
    ("/tag", r#""../up""#, "tag: it begins with a dot"),
    ("/tag", r#""a/b""#, "tag: it has '/'"),
    (
        "/files/0/name",
        r#""/etc/passwd""#,
        "files[0].name: it has '/'",
    ),
    (
        "/files/0/name",
        r#""..""#,
        "files[0].name: it begins with a dot",
    ),
    (
        "/files/0/name",
        r#""manifest.json""#,
        "files[0].name: it is the manifest's name",
    ),
    (
        "/files/0/name",
        r#""part-1.safetensors""#,
        "files[1].name: \"part-1.safetensors\" is there twice",
    ),
    (
        "/files/0/name",
        r#""z""#,
        "files[1].name: \"part-1.safetensors\" is not in the order",
    ),
    (
        "/files/0/bytes",
        "0",
        "files[0].data_begin: the file ends at 0",
    ),
    (
        "/files/0/bytes",
        "1099511627776",
        "files[0].chunks: 1 hashes; the file has 262144 chunks",
    ),
    ("/files/0/bytes", "-1", "files[0].bytes: "),
    ("/files/0/bytes", "1.5", "files[0].bytes: "),
    (
        "/files/0/chunks/0",
        r#""ab""#,
        "files[0].chunks[0]: a hash has 64",
    ),
    ("/files/0/chunks", "[]", "files[0].chunks: 0 hashes"),
    ("/degrees/tensor", "0", "degrees.tensor: "),
    (
        "/partition",
        r#"[{"module": "m", "pp_rank": 1}]"#,
        "partition[0].pp_rank: ",
    ),
    (
        "/tensors/1/dtype",
        r#""F4""#,
        "tensors[1].dtype: it has less than a byte",
    ),
    ("/tensors/1/dtype", r#""F31""#, "tensors[1].dtype: "),
    (
        "/tensors/1/dtype",
        r#""F64""#,
        "tensors[1].pieces[0].bytes: 0 to 16 are not the 32",
    ),
    (
        "/tensors/1/shape",
        "[18446744073709551615, 2]",
        "tensors[1].shape: its bytes are beyond",
    ),
    (
        "/tensors/1/shape",
        "[2305843009213693952, 2]",
        "tensors[1].shape: its bytes are beyond",
    ),
    (
        "/tensors/1/shape",
        "[3, 2]",
        "tensors[1].pieces[1].region: the region has 4 elements",
    ),
    (
        "/tensors/1/shape",
        "[5, 2]",
        "tensors[1].pieces: they hold 8 of its 10",
    ),
    (
        "/tensors/1/pieces/0/region/size",
        "[2]",
        "tensors[1].pieces[0].region: the region has 1",
    ),
    (
        "/tensors/1/pieces/0/region/size",
        "[0, 2]",
        "tensors[1].pieces[0].region: it is empty",
    ),
    (
        "/tensors/1/pieces/0/region/offset",
        "[1, 0]",
        "tensors[1].pieces[1].region: pieces[0] holds",
    ),
    (
        "/tensors/1/pieces/0/region/offset",
        "[18446744073709551615, 0]",
        "tensors[1].pieces[0].region: ",
    ),
    (
        "/tensors/1/pieces/0/file",
        "2",
        "tensors[1].pieces[0].file: there are 2",
    ),
    (
        "/tensors/1/pieces/0/file",
        "1",
        "tensors[1].pieces[1].bytes.begin: ",
    ),
    (
        "/tensors/1/pieces/0/bytes/end",
        "17",
        "tensors[1].pieces[0].bytes: it ends at 17",
    ),
    (
        "/tensors/1/pieces/0/bytes",
        r#"{"begin": 16, "end": 0}"#,
        "tensors[1].pieces[0].bytes: ",
    ),
    (
        "/tensors/1/pieces/1/region/elements/count",
        "5",
        "tensors[1].pieces[1].region: the run",
    ),
    (
        "/tensors/1/name",
        r#""a""#,
        "tensors[1].name: \"a\" is there twice",
    ),
    (
        "/tensors/1/pieces",
        r#"[{"file": 1, "region": {"offset": [0, 0], "size": [4, 2], "elements": {"first": 4, "count": 4}},
            "bytes": {"begin": 0, "end": 16}},
            {"file": 0, "region": {"offset": [0, 0], "size": [2, 2]}, "bytes": {"begin": 0, "end": 16}}]"#,
        "tensors[1].pieces[1].region: it begins before",
    ),
    ("/tensors/1/extra", "1", "tensors[1]"),
    (
        "/aliases/0/of",
        r#""c""#,
        "aliases[0].of: there is no tensor \"c\"",
    ),
    (
        "/aliases/0/name",
        r#""a""#,
        "aliases[0].name: it is the name of another",
    ),
    ("/extra", "1", "extra: unknown field"),
];

#[test]
fn what_cannot_be_true_is_refused_with_its_place() {
    for (place, value, expected) in UNTRUE {
        let value: Value = serde_json::from_str(value).unwrap();
        let mut object = object(&small());
        let (parent, field) = place.rsplit_once('/').unwrap();
        match object.pointer_mut(parent).unwrap() {
            Value::Object(fields) => drop(fields.insert(field.to_owned(), value)),
            Value::Array(list) => list[field.parse::<usize>().unwrap()] = value,
            other => panic!("{place} is in {other}"),
        }
        let error = refused(&object).to_string();
        assert!(error.starts_with(expected), "{place}: {error}");
    }
}

#[test]
fn a_value_that_is_there_twice_is_refused() {
    let text =
        object(&small())
            .to_string()
            .replacen("\"tag\":\"t\"", "\"tag\":\"t\",\"tag\":\"t\"", 1);
    let error = Manifest::from_bytes(&seal(&text)).unwrap_err();
    assert!(error.to_string().contains("duplicate field"), "{error}");
}

#[test]
fn parts_that_do_not_fit_are_refused_by_the_tensors_name() {
    let (mut reports, _) = in_memory(&[two_halves()], 2);
    let lost = assemble("t", 0, description(), vec![reports[0].clone()]).unwrap_err();
    let expected = "the parts do not make a checkpoint of tensor \"b\" (in part-0.safetensors): tensors[0].pieces: they hold \
                    4 of its 8 elements";
    assert_eq!(lost.to_string(), expected);
    let mut twice = reports[0].clone();
    twice.file.name = "part-9.safetensors".to_owned();
    let twice = assemble("t", 0, description(), vec![reports[0].clone(), twice]).unwrap_err();
    assert!(
        twice.to_string().contains("pieces[0] holds some of it too"),
        "{twice}"
    );
    reports[1].tensors[0].dtype = Dtype::I32;
    let error = assemble("t", 0, description(), reports).unwrap_err();
    let expected = "tensor \"b\" has type F32 and shape [4, 2] in part-0.safetensors and type I32 and shape [4, 2] in \
                    part-1.safetensors";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn all_differences_are_listed() {
    let wanted = |entries: &[(&str, Dtype, &[u64])]| {
        let entries = entries.iter().map(|(name, dtype, shape)| {
            let kind = TensorKind {
                dtype: *dtype,
                shape: shape.to_vec(),
            };
            ((*name).to_owned(), kind)
        });
        entries.collect::<BTreeMap<_, _>>()
    };
    let manifest = small();
    let same = wanted(&[("a", Dtype::F32, &[0, 3]), ("tied", Dtype::F32, &[4, 2])]);
    assert_eq!(differences(&same, &manifest), []);
    let other = wanted(&[("b", Dtype::F16, &[2, 4]), ("c", Dtype::F32, &[])]);
    let found = differences(&other, &manifest);
    let text: Vec<String> = found.iter().map(Difference::to_string).collect();
    let expected = [
        "unexpected: a",
        "shape: b is [4, 2], wanted [2, 4]",
        "dtype: b is F32, wanted F16",
        "missing: c",
    ];
    assert_eq!(text, expected);
}

proptest! {
    #[test]
    fn manifests_come_back_as_they_were(tensors in (divided("x", 4), divided("y", 4))) {
        let (manifest, _) = manifest(&[tensors.0, tensors.1], 4);
        let bytes = manifest.to_bytes();
        let back = Manifest::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&back, &manifest);
        prop_assert_eq!(back.to_bytes(), bytes);
    }

    #[test]
    fn any_two_pieces_with_a_common_element_are_refused(
        tensor in divided("x", 3),
        one in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
    ) {
        // Twice the same region in place of another one: the count may fit, the pieces do not.
        let mut tensor = tensor;
        let (one, other) = (one.index(tensor.pieces.len()), other.index(tensor.pieces.len()));
        prop_assume!(one != other);
        tensor.pieces[one].1 = tensor.pieces[other].1.clone();
        let (reports, _) = in_memory(&[tensor], 3);
        prop_assert!(assemble("t", 0, description(), reports).is_err());
    }
}
