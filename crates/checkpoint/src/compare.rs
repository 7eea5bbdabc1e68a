//! Whether tensors of two checkpoints have the same elements, however either is divided.

use serde::Serialize;

use crate::error::CheckpointError;
use crate::manifest::Tensor;
use crate::read::{Checkpoint, Wanted};
use crate::region::Region;

/// How much is read of either at once.
const BLOCK_BYTES: u64 = 64 << 20;

/// A tensor whose elements differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unequal {
    /// The tensor's name.
    pub name: String,
    /// How many of its elements differ in their bits.
    pub elements: u64,
    /// Out of how many.
    pub of: u64,
}

/// Consecutive elements of a tensor.
struct Stretch<'a> {
    tensor: &'a Tensor,
    first: u64,
    count: u64,
}

/// The tensors of the same name, type and shape in both whose elements differ, in the order of names.
pub fn unequal(a: &Checkpoint, b: &Checkpoint) -> Result<Vec<Unequal>, CheckpointError> {
    let mut found: Vec<Unequal> = Vec::new();
    let mut block: Vec<Stretch<'_>> = Vec::new();
    let mut room = BLOCK_BYTES;
    for tensor in &a.manifest().tensors {
        let other = b.manifest().tensor(&tensor.name);
        if other.is_none_or(|one| one.dtype != tensor.dtype || one.shape != tensor.shape) {
            continue;
        }
        let (item, mut first) = (tensor.item_bytes(), 0);
        while first < tensor.num_elements() {
            let count = (tensor.num_elements() - first).min((room / item).max(1));
            block.push(Stretch {
                tensor,
                first,
                count,
            });
            first += count;
            room = room.saturating_sub(count * item);
            if room < item {
                compare(a, b, &block, &mut found)?;
                block.clear();
                room = BLOCK_BYTES;
            }
        }
    }
    compare(a, b, &block, &mut found)?;
    Ok(found)
}

fn compare(
    a: &Checkpoint,
    b: &Checkpoint,
    block: &[Stretch<'_>],
    found: &mut Vec<Unequal>,
) -> Result<(), CheckpointError> {
    let (in_a, in_b) = (read(a, block)?, read(b, block)?);
    for (stretch, (in_a, in_b)) in block.iter().zip(in_a.iter().zip(&in_b)) {
        let item = stretch.tensor.item_bytes() as usize;
        let elements = in_a.chunks(item).zip(in_b.chunks(item));
        let elements = elements.filter(|(a, b)| a != b).count() as u64;
        match found.last_mut() {
            _ if elements == 0 => {}
            Some(last) if last.name == stretch.tensor.name => last.elements += elements,
            _ => found.push(Unequal {
                name: stretch.tensor.name.clone(),
                elements,
                of: stretch.tensor.num_elements(),
            }),
        }
    }
    Ok(())
}

fn read(checkpoint: &Checkpoint, block: &[Stretch<'_>]) -> Result<Vec<Vec<u8>>, CheckpointError> {
    let memory = block.iter().map(|stretch| {
        let bytes = stretch.count * stretch.tensor.item_bytes();
        vec![0; bytes as usize]
    });
    let mut memory: Vec<Vec<u8>> = memory.collect();
    let wanted = block.iter().zip(&mut memory).map(|(stretch, into)| Wanted {
        name: &stretch.tensor.name,
        region: Region::whole(&stretch.tensor.shape).run(stretch.first, stretch.count),
        into,
    });
    checkpoint.read(wanted.collect())?;
    Ok(memory)
}
