//! `advance_twister`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use shardwright_core::twister::{BLOCK, advance, block_after};

/// The state of torch's generator of the CPU after it has drawn so many words of 32 bits, as ``get_state`` gives it.
///
/// Numbers that it keeps for later (the second of two of a normal distribution) stay.
#[pyfunction]
#[pyo3(signature = (state, words, /))]
pub(crate) fn advance_twister<'py>(
    py: Python<'py>,
    state: &[u8],
    words: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut after = state.to_vec();
    move_on(&mut after, words)
        .ok_or_else(|| PyValueError::new_err("not the state of a generator of the CPU"))?;
    Ok(PyBytes::new(py, &after))
}

/// Where torch's `CPUGeneratorImplStateLegacy` has the number of words left in its block, and one; that of the words
/// drawn; and the block, each of whose words takes 64 bits.
const LEFT: usize = 8;
const NEXT: usize = 16;
const WORDS: usize = 24;

fn move_on(state: &mut [u8], words: u64) -> Option<()> {
    let block_of_words = BLOCK as u64;
    let left = u64::from(u32::from_ne_bytes(
        state.get(LEFT..LEFT + 4)?.try_into().ok()?,
    ));
    let drawn = (block_of_words + 1).checked_sub(left)?;
    let after = advance(drawn, words);
    if after.blocks > 0 {
        let held = state.get_mut(WORDS..WORDS + 8 * BLOCK)?;
        let mut block = [0_u32; BLOCK];
        for (word, bytes) in block.iter_mut().zip(held.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().ok()?) as u32;
        }
        for (word, bytes) in block_after(&block, after.blocks)
            .iter()
            .zip(held.chunks_exact_mut(8))
        {
            bytes.copy_from_slice(&u64::from(*word).to_ne_bytes());
        }
    }
    if words > 0 {
        let left = (block_of_words + 1 - after.drawn) as u32;
        state
            .get_mut(LEFT..LEFT + 4)?
            .copy_from_slice(&left.to_ne_bytes());
        state
            .get_mut(NEXT..NEXT + 8)?
            .copy_from_slice(&after.drawn.to_ne_bytes());
    }
    Some(())
}
