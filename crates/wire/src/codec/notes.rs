//! What is noted of tensors. Lists are bounded by the number of tensors that a body may have.

use super::reader::Reader;
use super::value::{self, Budget};
use super::writer::{Writer, bounded};
use super::{CodecError, Limits};
use crate::notes::{ArgumentNotes, Base, Composite, Recipe, ResultNotes, View};

/// WI-4: what is noted names tensors of its body.
fn check(indices: impl Iterator<Item = u32>, tensors: usize) -> Result<(), CodecError> {
    for index in indices {
        if index as usize >= tensors {
            return Err(CodecError::TensorIndex { index, tensors });
        }
    }
    Ok(())
}

/// WI-4, for the numbers of gradients' tensors.
pub(super) fn check_gradients(
    gradients: &[(u32, u32)],
    limits: &Limits,
    tensors: usize,
) -> Result<(), CodecError> {
    bounded("gradients", gradients.len() as u64, limits.tensors)?;
    check(gradients.iter().map(|(_, tensor)| *tensor), tensors)
}

fn check_arguments(notes: &ArgumentNotes, tensors: usize) -> Result<(), CodecError> {
    let lists = [
        &notes.overlapping,
        &notes.relaid,
        &notes.hooked_views,
        &notes.kept,
    ];
    let named = notes.shared.iter().flatten();
    let named = named.chain(lists.into_iter().flatten()).copied();
    let laid = notes.strides.iter().map(|(index, _)| *index);
    check(named.chain(laid).chain(parts(&notes.composites)), tensors)
}

fn check_results(notes: &ResultNotes, tensors: usize) -> Result<(), CodecError> {
    let lists = [&notes.watch, &notes.dropped, &notes.kept_results];
    let made = notes.recipes.iter().flat_map(|(place, recipe)| {
        let base = match recipe {
            Recipe::View {
                base: Base::Result(result),
                ..
            } => Some(*result),
            Recipe::View { .. } | Recipe::Argument { .. } => None,
        };
        [Some(*place), base].into_iter().flatten()
    });
    let named = lists.into_iter().flatten().copied().chain(made);
    let laid = notes.strides.iter().map(|(index, _)| *index);
    let written = notes.written.iter().map(|(_, place)| *place);
    let parts = parts(&notes.composites);
    check(named.chain(laid).chain(written).chain(parts), tensors)
}

/// The places of tensors that travel as several, and of what they travel as.
fn parts(composites: &[(u32, Composite)]) -> impl Iterator<Item = u32> {
    let composites = composites.iter();
    composites.flat_map(|(place, composite)| std::iter::once(*place).chain(composite.parts()))
}

/// Ordinary arguments need no note, and one byte.
pub(super) fn write_arguments(
    writer: &mut Writer,
    notes: &ArgumentNotes,
    tensors: usize,
) -> Result<(), CodecError> {
    if *notes == ArgumentNotes::default() {
        writer.bool(false);
        return Ok(());
    }
    writer.bool(true);
    check_arguments(notes, tensors)?;
    writer.list(&notes.shared, |writer, group| {
        writer.list(group, |writer, index| writer.u32(*index));
    });
    write_strides(writer, &notes.strides);
    write_indices(writer, &notes.overlapping);
    write_indices(writer, &notes.relaid);
    writer.list(&notes.composites, write_composite);
    write_indices(writer, &notes.hooked_views);
    writer.bool(notes.private);
    write_indices(writer, &notes.kept);
    Ok(())
}

pub(super) fn read_arguments(
    reader: &mut Reader<'_>,
    limits: &Limits,
    tensors: usize,
) -> Result<ArgumentNotes, CodecError> {
    if !reader.bool()? {
        return Ok(ArgumentNotes::default());
    }
    let notes = ArgumentNotes {
        shared: reader.list("groups of tensors", limits.tensors, |reader| {
            read_indices(reader, limits)
        })?,
        strides: read_strides(reader, limits)?,
        overlapping: read_indices(reader, limits)?,
        relaid: read_indices(reader, limits)?,
        composites: read_composites(reader, limits)?,
        hooked_views: read_indices(reader, limits)?,
        private: reader.bool()?,
        kept: read_indices(reader, limits)?,
    };
    check_arguments(&notes, tensors)?;
    Ok(notes)
}

/// Ordinary results need no note, and one byte.
pub(super) fn write_results(
    writer: &mut Writer,
    notes: &ResultNotes,
    limits: &Limits,
    tensors: usize,
) -> Result<(), CodecError> {
    if *notes == ResultNotes::default() {
        writer.bool(false);
        return Ok(());
    }
    writer.bool(true);
    check_results(notes, tensors)?;
    writer.list(&notes.recipes, |writer, (place, recipe)| {
        writer.u32(*place);
        write_recipe(writer, recipe);
    });
    write_strides(writer, &notes.strides);
    write_indices(writer, &notes.watch);
    write_indices(writer, &notes.watch_arguments);
    writer.list(&notes.written, |writer, pair| write_pair(writer, *pair));
    write_indices(writer, &notes.dropped);
    writer.list(&notes.composites, write_composite);
    write_indices(writer, &notes.kept_arguments);
    write_indices(writer, &notes.kept_results);
    writer.bool(notes.collected.is_some());
    if let Some(collected) = &notes.collected {
        value::write(writer, collected, 0, &mut Budget::new(limits, tensors))?;
    }
    writer.bool(notes.open);
    writer.bool(notes.hooked);
    writer.bool(notes.ordered);
    Ok(())
}

pub(super) fn read_results(
    reader: &mut Reader<'_>,
    limits: &Limits,
    tensors: usize,
) -> Result<ResultNotes, CodecError> {
    if !reader.bool()? {
        return Ok(ResultNotes::default());
    }
    let notes = ResultNotes {
        recipes: reader.list("recipes", limits.tensors, |reader| {
            Ok((reader.u32()?, read_recipe(reader, limits)?))
        })?,
        strides: read_strides(reader, limits)?,
        watch: read_indices(reader, limits)?,
        watch_arguments: read_indices(reader, limits)?,
        written: reader.list("written arguments", limits.tensors, read_pair)?,
        dropped: read_indices(reader, limits)?,
        composites: read_composites(reader, limits)?,
        kept_arguments: read_indices(reader, limits)?,
        kept_results: read_indices(reader, limits)?,
        collected: reader
            .option(|reader| value::read(reader, 0, &mut Budget::new(limits, tensors)))?,
        open: reader.bool()?,
        hooked: reader.bool()?,
        ordered: reader.bool()?,
    };
    check_results(&notes, tensors)?;
    Ok(notes)
}

pub(super) fn write_pair(writer: &mut Writer, (first, second): (u32, u32)) {
    writer.u32(first);
    writer.u32(second);
}

pub(super) fn read_pair(reader: &mut Reader<'_>) -> Result<(u32, u32), CodecError> {
    Ok((reader.u32()?, reader.u32()?))
}

fn write_indices(writer: &mut Writer, indices: &[u32]) {
    writer.list(indices, |writer, index| writer.u32(*index));
}

fn read_indices(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<u32>, CodecError> {
    reader.list("numbers of tensors", limits.tensors, Reader::u32)
}

fn write_strides(writer: &mut Writer, strides: &[(u32, Vec<u64>)]) {
    writer.list(strides, |writer, (index, strides)| {
        writer.u32(*index);
        write_sizes(writer, strides);
    });
}

fn read_strides(
    reader: &mut Reader<'_>,
    limits: &Limits,
) -> Result<Vec<(u32, Vec<u64>)>, CodecError> {
    reader.list("tensors that are not dense", limits.tensors, |reader| {
        Ok((reader.u32()?, read_sizes(reader, limits)?))
    })
}

fn write_sizes(writer: &mut Writer, sizes: &[u64]) {
    writer.list(sizes, |writer, size| writer.u64(*size));
}

fn read_sizes(reader: &mut Reader<'_>, limits: &Limits) -> Result<Vec<u64>, CodecError> {
    reader.list("dimensions", limits.dimensions, Reader::u64)
}

fn write_recipe(writer: &mut Writer, recipe: &Recipe) {
    match recipe {
        Recipe::Argument {
            argument,
            requires_grad,
        } => {
            writer.u8(0);
            writer.u32(*argument);
            writer.bool(*requires_grad);
        }
        Recipe::View {
            base,
            view,
            requires_grad,
        } => {
            let (tag, number) = match *base {
                Base::Argument(argument) => (1, argument),
                Base::Result(result) => (2, result),
            };
            writer.u8(tag);
            writer.u32(number);
            write_sizes(writer, &view.shape);
            write_sizes(writer, &view.strides);
            writer.i64(view.offset);
            writer.bool(view.conjugated);
            writer.bool(view.negated);
            writer.bool(view.grad_mode);
            writer.bool(*requires_grad);
        }
    }
}

fn read_recipe(reader: &mut Reader<'_>, limits: &Limits) -> Result<Recipe, CodecError> {
    let tag = reader.u8()?;
    let number = reader.u32()?;
    let base = match tag {
        0 => {
            return Ok(Recipe::Argument {
                argument: number,
                requires_grad: reader.bool()?,
            });
        }
        1 => Base::Argument(number),
        2 => Base::Result(number),
        found => {
            return Err(CodecError::Tag {
                what: "recipe",
                found: u64::from(found),
            });
        }
    };
    let view = View {
        shape: read_sizes(reader, limits)?,
        strides: read_sizes(reader, limits)?,
        offset: reader.i64()?,
        conjugated: reader.bool()?,
        negated: reader.bool()?,
        grad_mode: reader.bool()?,
    };
    Ok(Recipe::View {
        base,
        view,
        requires_grad: reader.bool()?,
    })
}

fn write_composite(writer: &mut Writer, (place, composite): &(u32, Composite)) {
    writer.u32(*place);
    match composite {
        Composite::Argument(argument) => {
            writer.u8(0);
            writer.u32(*argument);
        }
        Composite::Sparse {
            indices,
            values,
            shape,
            coalesced,
        } => {
            writer.u8(1);
            writer.u32(*indices);
            writer.u32(*values);
            write_sizes(writer, shape);
            writer.bool(*coalesced);
        }
        Composite::Nested {
            values,
            offsets,
            ragged_dimension,
        } => {
            writer.u8(2);
            writer.u32(*values);
            writer.u32(*offsets);
            writer.u32(*ragged_dimension);
        }
    }
}

fn read_composites(
    reader: &mut Reader<'_>,
    limits: &Limits,
) -> Result<Vec<(u32, Composite)>, CodecError> {
    reader.list("tensors of several parts", limits.tensors, |reader| {
        let place = reader.u32()?;
        let composite = match reader.u8()? {
            0 => Composite::Argument(reader.u32()?),
            1 => Composite::Sparse {
                indices: reader.u32()?,
                values: reader.u32()?,
                shape: read_sizes(reader, limits)?,
                coalesced: reader.bool()?,
            },
            2 => Composite::Nested {
                values: reader.u32()?,
                offsets: reader.u32()?,
                ragged_dimension: reader.u32()?,
            },
            found => {
                return Err(CodecError::Tag {
                    what: "tensor of several parts",
                    found: u64::from(found),
                });
            }
        };
        Ok((place, composite))
    })
}
