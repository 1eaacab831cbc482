// Numbers: how they are written, smoothed and stacked.

// A value as short text, as `charts.number` writes it.
function shortNumber(value) {
  if (value == null || !Number.isFinite(value)) return "—";
  const size = Math.abs(value);
  if (size >= 1e7 || (size < 1e-3 && size > 0)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return `${Number(value.toPrecision(4))}`;
}

// Exponential moving average with bias correction, as TensorBoard and W&B draw it: without the correction the first
// values would be drawn towards 0. Values that are null stay null and count for nothing.
function smooth(values, weight) {
  let sum = 0, bias = 1;
  return values.map((value) => {
    if (value == null) return value;
    sum = sum * weight + value * (1 - weight);
    bias *= weight;
    return sum / (1 - bias);
  });
}

// Lists of values (all of one length) → their cumulative sums, the first list at the bottom.
function stack(lists) {
  let below = null;
  return lists.map((values) => (below = values.map((value, i) => value + (below ? below[i] : 0))));
}
