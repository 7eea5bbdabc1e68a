//! A golden manifest: boxes, a run, an empty tensor, tied names, user content.

use std::num::NonZeroU32;

use shardwright_checkpoint::{
    Alias, Bytes, ChunkHash, Degrees, Description, Dtype, Manifest, PartFile, PartReport, Piece,
    Placement, Region, Tensor, assemble,
};

fn part(name: &str, data: u64, tensors: Vec<Tensor>) -> PartReport {
    let file = PartFile {
        name: name.to_owned(),
        bytes: 8 + data,
        data_begin: 8,
        chunks: vec![ChunkHash::of(name.as_bytes())],
    };
    PartReport { file, tensors }
}

fn tensor(name: &str, shape: &[u64], pieces: Vec<(Region, u64, u64)>) -> Tensor {
    let pieces = pieces.into_iter().map(|(region, begin, end)| Piece {
        file: 0,
        region,
        bytes: Bytes { begin, end },
    });
    Tensor {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: shape.to_vec(),
        pieces: pieces.collect(),
    }
}

/// A manifest without its seal.
pub(crate) fn unsealed() -> String {
    let half = |column| Region::boxed(vec![0, column], vec![2, 2]);
    let run = |first, count| Region::whole(&[5]).run(first, count);
    let parts = vec![
        part(
            "a",
            7,
            vec![
                tensor("m", &[2, 4], vec![(half(0), 0, 4)]),
                tensor("o", &[5], vec![(run(0, 3), 4, 7)]),
            ],
        ),
        part(
            "b",
            6,
            vec![
                tensor("m", &[2, 4], vec![(half(2), 2, 6)]),
                tensor("n", &[0], Vec::new()),
                tensor("o", &[5], vec![(run(3, 2), 0, 2)]),
            ],
        ),
    ];
    let two = NonZeroU32::new(2).unwrap();
    let description = Description {
        library_version: "0.1.0".to_owned(),
        step: Some(3),
        degrees: Degrees {
            pipeline: two,
            tensor: two,
            ..Degrees::ONE
        },
        partition: vec![Placement {
            module: "m".to_owned(),
            pp_rank: 1,
        }],
        aliases: vec![Alias {
            name: "p".to_owned(),
            of: "m".to_owned(),
        }],
        user_content: [1, 2].into(),
    };
    let manifest: Manifest = assemble("t", 0, description, parts).unwrap();
    let sealed = String::from_utf8(manifest.to_bytes()).unwrap();
    let (_, rest) = sealed.split_once('\n').unwrap();
    format!("{{{}", rest.trim_end())
}
