// All kernels. Include the header of what you use instead.
#pragma once

#include "kernels/cast.h"
#include "kernels/copy.h"
#include "kernels/embedding_rows.h"
#include "kernels/fused_adam.h"
#include "kernels/loading.h"
#include "kernels/reduce.h"
