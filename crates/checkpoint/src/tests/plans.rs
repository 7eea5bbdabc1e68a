//! Plans, carried out in memory and compared with counting elements.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::division::{Divided, divided, elements_of, manifest, region};
use crate::{Manifest, PlanError, Region, plan};

const FILES: usize = 3;

fn read(manifest: &Manifest, files: &[Vec<u8>], name: &str, wanted: &Region) -> Vec<u8> {
    let reads = plan(manifest.tensor(name).unwrap(), wanted).unwrap();
    let total: u64 = reads.iter().map(|read| read.bytes).sum();
    let mut bytes = vec![0; total as usize];
    let mut filled = BTreeSet::new();
    for read in &reads {
        let source = (manifest.files[read.file].data_begin + read.source) as usize;
        let (into, length) = (read.destination as usize, read.bytes as usize);
        bytes[into..into + length].copy_from_slice(&files[read.file][source..source + length]);
        for byte in into..into + length {
            assert!(filled.insert(byte), "byte {byte} is read twice");
        }
    }
    bytes
}

fn divided_with_region() -> impl Strategy<Value = (Divided, Region)> {
    divided("a", FILES).prop_flat_map(|tensor| {
        let wanted = region(&tensor.shape);
        (Just(tensor), wanted)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn any_division_gives_any_region(case in divided_with_region()) {
        let (tensor, wanted) = case;
        let (manifest, files) = manifest(std::slice::from_ref(&tensor), FILES);
        let found = read(&manifest, &files, "a", &wanted);
        prop_assert_eq!(found, tensor.bytes_of(&wanted));
    }

    #[test]
    fn what_no_piece_holds_is_named(case in divided_with_region(), lost in any::<prop::sample::Index>()) {
        let (tensor, wanted) = case;
        let (manifest, _) = manifest(std::slice::from_ref(&tensor), FILES);
        let mut held = manifest.tensors[0].clone();
        let gone = held.pieces.remove(lost.index(held.pieces.len()));
        let elements = |region: &Region| -> BTreeSet<usize> {
            elements_of(&tensor.shape, region).into_iter().collect()
        };
        let (gone, asked) = (elements(&gone.region), elements(&wanted));
        let expected: BTreeSet<usize> = gone.intersection(&asked).copied().collect();
        match plan(&held, &wanted) {
            Ok(_) => prop_assert!(expected.is_empty()),
            Err(PlanError::Missing { missing, .. }) => {
                let named: Vec<usize> =
                    missing.iter().flat_map(|region| elements_of(&tensor.shape, region)).collect();
                prop_assert_eq!(named.len(), expected.len());
                prop_assert_eq!(named.into_iter().collect::<BTreeSet<_>>(), expected);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn rows_that_lie_together_are_one_read() {
    let tensor = Divided {
        name: "a".to_owned(),
        dtype: crate::Dtype::F32,
        shape: vec![8, 4],
        bytes: (0..128).collect(),
        pieces: vec![
            (0, Region::boxed(vec![0, 0], vec![4, 4])),
            (1, Region::boxed(vec![4, 0], vec![4, 4])),
        ],
    };
    let (manifest, _) = manifest(&[tensor], 2);
    let reads = |wanted| plan(&manifest.tensors[0], &wanted).unwrap().len();
    assert_eq!(reads(Region::whole(&[8, 4])), 2);
    assert_eq!(reads(Region::boxed(vec![1, 0], vec![2, 4])), 1);
    assert_eq!(reads(Region::boxed(vec![2, 1], vec![4, 2])), 4);
}

#[test]
fn a_region_outside_the_tensor_is_refused() {
    let tensor = Divided {
        name: "a".to_owned(),
        dtype: crate::Dtype::U8,
        shape: vec![4],
        bytes: vec![1, 2, 3, 4],
        pieces: vec![(0, Region::whole(&[4]))],
    };
    let (manifest, _) = manifest(&[tensor], 1);
    let error = plan(&manifest.tensors[0], &Region::boxed(vec![2], vec![3])).unwrap_err();
    let expected = "[2:5] of tensor \"a\" cannot be read: the region has 3 elements from 2 on in dimension 0, the tensor 4";
    assert_eq!(error.to_string(), expected);
}
