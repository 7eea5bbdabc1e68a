//! Tensors, and all ways to divide them.

use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::json;

use crate::{Degrees, Description, PieceView, Region, hash_chunks, num_elements};
use crate::{Manifest, PartFile, PartReport, assemble, part::lay_out};

pub(super) const DTYPES: [Dtype; 4] = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64];

/// A tensor, and what each of the files has of it.
#[derive(Clone, Debug)]
pub(super) struct Divided {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Of the whole.
    pub(super) bytes: Vec<u8>,
    /// With the file of each.
    pub(super) pieces: Vec<(usize, Region)>,
}

impl Divided {
    /// The bytes of a region, element by element.
    pub(super) fn bytes_of(&self, region: &Region) -> Vec<u8> {
        let item = crate::item_bytes(self.dtype).unwrap() as usize;
        let elements = elements_of(&self.shape, region).into_iter();
        elements
            .flat_map(|element| self.bytes[element * item..][..item].iter().copied())
            .collect()
    }
}

/// The elements of a region by their places in the whole tensor: counted, without any cleverness.
pub(super) fn elements_of(shape: &[u64], region: &Region) -> Vec<usize> {
    let count = num_elements(&region.size).unwrap();
    let run = region.elements;
    let (first, number) = run.map_or((0, count), |run| (run.first, run.count));
    let place = |element: u64| {
        let (mut rest, mut place, mut stride) = (element, 0, 1);
        for dimension in (0..shape.len()).rev() {
            let side = region.size[dimension];
            place += (region.offset[dimension] + rest % side) * stride;
            rest /= side;
            stride *= shape[dimension];
        }
        place as usize
    };
    (first..first + number).map(place).collect()
}

/// Shapes of a few hundred elements at most.
fn shapes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1u64..7, 0..5)
}

/// Where a side is cut.
fn cuts(side: u64) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::btree_set(1..side.max(2), 0..3).prop_map(move |cuts| {
        let inner = cuts.into_iter().filter(|cut| *cut < side);
        [0].into_iter().chain(inner).chain([side]).collect()
    })
}

fn grid(cuts: &[Vec<u64>]) -> Vec<Region> {
    let mut boxes = vec![Region::boxed(Vec::new(), Vec::new())];
    for side in cuts {
        let extended = boxes.iter().flat_map(|one| {
            side.windows(2).map(|ends| {
                let mut one = one.clone();
                one.offset.push(ends[0]);
                one.size.push(ends[1] - ends[0]);
                one
            })
        });
        boxes = extended.collect();
    }
    boxes
}

/// Grids, of which splits of one dimension are some, with boxes that are cut into runs of their elements.
fn divisions(shape: &[u64]) -> impl Strategy<Value = Vec<Region>> + use<> {
    let sides: Vec<_> = shape.iter().map(|side| cuts(*side)).collect();
    let whole = grid(&shape.iter().map(|side| vec![0, *side]).collect::<Vec<_>>());
    let boxes = prop_oneof![sides.prop_map(|cuts| grid(&cuts)), Just(whole)];
    boxes.prop_flat_map(|boxes| {
        let divided: Vec<_> = boxes.into_iter().map(runs).collect();
        divided.prop_map(|pieces| pieces.into_iter().flatten().collect())
    })
}

fn runs(one: Region) -> BoxedStrategy<Vec<Region>> {
    let count = num_elements(&one.size).unwrap();
    let of_box = one.clone();
    let cut = cuts(count).prop_map(move |cuts| {
        let runs = cuts.windows(2);
        runs.map(|ends| of_box.clone().run(ends[0], ends[1] - ends[0]))
            .collect()
    });
    prop_oneof![Just(vec![one]), cut].boxed()
}

/// A tensor divided among up to `files` files.
pub(super) fn divided(name: &'static str, files: usize) -> impl Strategy<Value = Divided> {
    let parts = (shapes(), prop::sample::select(&DTYPES[..]), any::<u64>());
    parts.prop_flat_map(move |(shape, dtype, seed)| {
        let count = num_elements(&shape).unwrap() * crate::item_bytes(dtype).unwrap();
        let bytes = (0..count).map(|byte| (byte.wrapping_mul(seed | 1) >> 7) as u8 ^ byte as u8);
        let bytes: Vec<u8> = bytes.collect();
        let placed = divisions(&shape).prop_flat_map(move |regions| {
            let places = prop::collection::vec(0..files, regions.len());
            places.prop_map(move |places| places.into_iter().zip(regions.clone()).collect())
        });
        placed.prop_map(move |pieces| Divided {
            name: name.to_owned(),
            dtype,
            shape: shape.clone(),
            bytes: bytes.clone(),
            pieces,
        })
    })
}

/// Any region of a tensor.
pub(super) fn region(shape: &[u64]) -> impl Strategy<Value = Region> + use<> {
    let sides = shape.iter().map(|&side| {
        let ends = (0..=side, 0..=side);
        ends.prop_map(|(a, b)| (a.min(b), a.max(b) - a.min(b)))
    });
    let sides: Vec<_> = sides.collect();
    sides.prop_flat_map(|sides| {
        let (offset, size) = sides.into_iter().unzip();
        let one = Region::boxed(offset, size);
        let count = num_elements(&one.size).unwrap();
        let run = (0..=count, 0..=count);
        let of_box = one.clone();
        let run = run.prop_map(move |(a, b)| of_box.clone().run(a.min(b), a.max(b) - a.min(b)));
        prop_oneof![Just(one), run]
    })
}

pub(super) fn part_name(file: usize) -> String {
    format!("part-{file}.safetensors")
}

/// What a file has of the tensors: memory to point into, and which tensor and region each is.
pub(super) fn held(tensors: &[Divided], file: usize) -> Vec<(&Divided, &Region, Vec<u8>)> {
    let all = tensors.iter().flat_map(|tensor| {
        let pieces = tensor
            .pieces
            .iter()
            .filter(move |(place, _)| *place == file);
        pieces.map(move |(_, region)| (tensor, region, tensor.bytes_of(region)))
    });
    all.collect()
}

pub(super) fn views<'a>(held: &'a [(&'a Divided, &'a Region, Vec<u8>)]) -> Vec<PieceView<'a>> {
    let views = held.iter().map(|(tensor, region, bytes)| PieceView {
        name: &tensor.name,
        dtype: tensor.dtype,
        shape: &tensor.shape,
        region: (*region).clone(),
        bytes,
    });
    views.collect()
}

pub(super) fn description() -> Description {
    Description {
        library_version: "0.1.0".to_owned(),
        step: Some(7),
        degrees: Degrees::ONE,
        partition: Vec::new(),
        aliases: Vec::new(),
        user_content: json!({"epoch": 1, "rates": [0.1, 1e-300], "name": "\u{e9}\n"}),
    }
}

/// What ranks would report, and their files, all in memory.
pub(super) fn in_memory(tensors: &[Divided], files: usize) -> (Vec<PartReport>, Vec<Vec<u8>>) {
    let parts = (0..files).map(|file| {
        let held = held(tensors, file);
        let views = views(&held);
        let layout = lay_out(&views).unwrap();
        let mut bytes = layout.header.clone();
        for place in layout.order {
            bytes.extend_from_slice(views[place].bytes);
        }
        assert_eq!(bytes.len() as u64, layout.bytes);
        let file = PartFile {
            name: part_name(file),
            bytes: layout.bytes,
            data_begin: layout.header.len() as u64,
            chunks: hash_chunks([&bytes[..]]),
        };
        let tensors = layout.tensors;
        (PartReport { file, tensors }, bytes)
    });
    parts.unzip()
}

/// The manifest of files in memory, and the files.
pub(super) fn manifest(tensors: &[Divided], files: usize) -> (Manifest, Vec<Vec<u8>>) {
    let (reports, bytes) = in_memory(tensors, files);
    (assemble("t", 0, description(), reports).unwrap(), bytes)
}
